"""A server with an OpenAI endpoint, which `vllm bench serve` measures."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).parent / "runners" / "vllm_bench.py"
MODEL = "model"  # name of the model at the endpoint
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """Requests with random prompts of `input_len` tokens, which generate `output_len` tokens.

    `concurrency` requests arrive per second, as a Poisson process, and at most `concurrency` are in
    flight. Lengths vary by the fraction `variation`.
    """

    concurrency: int
    num_requests: int
    variation: float = 0.0
    input_len: int = 128
    output_len: int = 64


class Server:
    """A running server process. Without requests it uses no core.

    Args:
        command: the server's command.
        port: port of its endpoint on 127.0.0.1.
        log: file that gets the server's output.
        environment: variables that are added to the environment of this process.

    Attributes:
        start_s: seconds from the start of the process to its first response.

    Raises:
        RuntimeError: the server ended or did not answer within START_TIMEOUT_S.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        port: int,
        log: Path,
        environment: dict[str, str],
    ) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        started = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **environment}
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
                self.close()
                raise RuntimeError(f"the server did not start; see {log}")
            time.sleep(0.05)
        self.start_s = time.monotonic() - started

    def measure(self, load: Load, client: Path, tokenizer: Path, seed: int) -> dict[str, Any]:
        """Return the client's report.

        Args:
            load: the requests.
            client: interpreter with vLLM.
            tokenizer: folder of the checkpoint.
            seed: random seed of the prompts. Another seed prevents hits in the prefix cache.
        """
        report = self._log.with_suffix(".json")
        command: list[str | Path] = [client, CLIENT, "--backend", "openai", "--base-url", self._url]
        command += ["--model", MODEL, "--tokenizer", tokenizer, "--dataset-name", "random"]
        command += ["--ignore-eos", "--disable-tqdm", "--save-result"]
        options = {
            "random-input-len": load.input_len,
            "random-output-len": load.output_len,
            "random-range-ratio": load.variation,
            "num-prompts": load.num_requests,
            "max-concurrency": load.concurrency,
            "request-rate": load.concurrency,
            "num-warmups": 2,
            "temperature": 0,
            "metric-percentiles": 99,
            "seed": seed,
            "result-dir": report.parent,
            "result-filename": report.name,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        log = self._log.with_suffix(".client.log")
        with log.open("wb") as file:
            result = subprocess.run(command, stdout=file, stderr=file, check=False)
        if result.returncode:
            raise RuntimeError(f"the client failed; see {log}")
        measured: dict[str, Any] = json.loads(report.read_text())
        if measured["completed"] != load.num_requests:
            raise RuntimeError(f"only {measured['completed']} requests completed; see {log}")
        return measured

    def close(self) -> None:
        """Send SIGTERM, on which the server ends its children; after STOP_TIMEOUT_S, SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answers(self) -> bool:
        body = json.dumps({"model": MODEL, "prompt": [1], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return bool(response.status == 200)
        except OSError:  # includes refused connections, HTTP errors and timeouts
            return False
