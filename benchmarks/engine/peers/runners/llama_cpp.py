"""Runs llama.cpp through its HTTP server, because only the server batches continuously."""

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

NUM_SLOTS = 32  # faster than 64
START_TIMEOUT_S = 120.0


class Runner:
    def __init__(self, server: str, model: str, num_threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        subprocess.Popen(
            f"{server} -m {model} -t {num_threads} -tb {num_threads} -np {NUM_SLOTS} "
            f"-c {1024 * NUM_SLOTS} -b 2048 -ub 512 --no-webui "
            f"--host 127.0.0.1 --port {self._port}".split()
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"llama-server was not ready within {START_TIMEOUT_S:g} s")
            time.sleep(0.2)
        self._threads = ThreadPoolExecutor(64)

    def generate(self, works: list[tuple[list[int], int]]) -> list[list[int]]:
        return list(self._threads.map(self._complete, works))

    def _is_ready(self) -> bool:
        try:
            return self._request("GET", "/health")[0] == 200
        except OSError:
            return False

    def _complete(self, work: tuple[list[int], int]) -> list[int]:
        prompt, num_tokens = work
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, text = self._request("POST", "/completion", json.dumps(body))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {text[:200]}")
        return list(json.loads(text)["tokens"])

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text
