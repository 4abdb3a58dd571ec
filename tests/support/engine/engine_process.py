"""`baton-engine` with a fake executor in a separate process, and helpers for tests of it.

For the tests of the engine core process.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from baton_protocol.sampling_params import SamplingParams
from support.waiting import eventually

HOST = "127.0.0.1"
DEADLINE_S = 60.0
#: Limit for starting a process and its imports, on a machine where many processes start.
START_S = 180.0


class EngineProcess:
    """A `baton-engine` process with the fake executor."""

    def __init__(self, tmp_path: Path, *flags: str, **env: str) -> None:
        self.log = tmp_path / "engine.log"
        command = [
            sys.executable,
            "-m",
            "baton_engine.cli",
            "--model",
            "/nowhere",
            "--executor",
            "support.engine.engine_fakes.FakeExecutor",
        ]
        command += [
            "--engine-port",
            "0",
            "--http-port",
            "0",
            "--block-size",
            "4",
            "--num-blocks",
            "64",
            *flags,
        ]
        environment = {**os.environ, "POD_IP": HOST, "PYTHONPATH": os.pathsep.join(sys.path), **env}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        ports = re.compile(r"engine port (\d+), http port (\d+)")
        found = wait_for(
            lambda: ports.search(self.text), "ports in the log", self, deadline_s=START_S
        )
        self.engine_port, self.http_port = int(found[1]), int(found[2])

    @property
    def text(self) -> str:
        return self.log.read_text()

    def http(self, method: str, path: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{HOST}:{self.http_port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_ready(self) -> None:
        wait_for(lambda: self.http("GET", "/ready")[0] == 200, "/ready", self)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(
    condition: Callable[[], Any],
    what: str,
    engine: EngineProcess,
    *,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Wait for the first true value of `condition`, and return it. Fail if the engine ends."""

    def checked() -> Any:
        if result := condition():
            return result
        if engine.process.poll() is not None:
            raise RuntimeError(f"engine ended: {engine.text}")
        return None

    return eventually(checked, what, deadline_s, every_s=0.02)


async def connect(engine: EngineProcess, **options: Any) -> EngineClient:
    client = EngineClient(HOST, engine.engine_port, client_id="test", **options)
    await client.connect(DEADLINE_S)
    await client.wait_ready(DEADLINE_S)
    return client


def request(
    request_id: str, prompt: list[int], max_tokens: int = 8, **fields: object
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(request_id, prompt, params, **fields)  # type: ignore[arg-type]


async def collect(stream: object) -> list[EngineCoreOutput]:
    async with asyncio.timeout(DEADLINE_S):
        return [output async for output in stream]  # type: ignore[attr-defined]


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    for output in outputs:
        assert output.finish_reason is not FinishReason.ERROR, output.error
    return [token for output in outputs for token in output.new_token_ids]
