"""SIGKILL of each process of `baton serve` under load.

Clients receive an error at once, no process survives, and the port is free again.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest

from support.chaos.chaos_processes import (
    ENGINE_FLAGS,
    LAYOUTS,
    NOTICE_S,
    assert_port_is_free,
    free_port,
    tree,
)
from support.waiting import eventually

pytestmark = pytest.mark.chaos
MODULES = {
    "worker": "baton_engine.executor.multiproc.worker_main",
    "engine": "baton_engine.cli",
    "gateway": "baton_gateway.cli",
}


class Client(threading.Thread):
    """Streams completions until one fails."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        )
        self.num_chunks = 0
        #: Whether the current request has received a chunk.
        self.is_streaming = False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.is_streaming = False
                for _ in self._client.completions.create(
                    model="m",
                    prompt="hello",
                    max_tokens=200,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    self.num_chunks += 1
                    self.is_streaming = True
        except Exception as error:
            self.error = error


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ("tp2", "worker"),
        ("pp2", "worker"),
        ("tp2", "engine"),
        ("uniproc", "engine"),
        ("tp2", "gateway"),
        ("tp2", "serve"),
    ],
)
def test_a_kill_under_load_ends_serve_and_its_requests(
    checkpoint: Path, tmp_path: Path, layout: str, victim: str
) -> None:
    port = free_port()
    command = [
        "-m",
        "baton_local.cli",
        "serve",
        str(checkpoint),
        "--port",
        str(port),
        "--served-model-name",
        "m",
    ]
    with tree([*command, *ENGINE_FLAGS, *LAYOUTS[layout]], tmp_path / "log") as serve:
        serve.wait_for("baton serve: ready")
        clients = [Client(port) for _ in range(6)]
        eventually(
            lambda: all(client.num_chunks for client in clients),
            timeout_s=60,
            what="a token for every client",
        )
        killed = (
            psutil.Process(serve.process.pid)
            if victim == "serve"
            else serve.find(MODULES[victim])[-1]
        )
        killed.kill()
        deadline = time.monotonic() + NOTICE_S
        for client in clients:
            client.join(max(0.0, deadline - time.monotonic()))
            assert client.error is not None, f"a client is still waiting\n{serve.text[-3000:]}"
            if victim in ("worker", "engine"):  # the gateway survives and reports the reason
                is_new = isinstance(client.error, openai.APIConnectionError)
                if is_new and not client.is_streaming:
                    continue  # it sent a request after the gateway had ended
                assert re.search(
                    r"worker \d|earlier attempt failed|engine serving this request did not finish",
                    str(client.error),
                ), client.error
        serve.assert_no_process_survives()
        assert_port_is_free(port)
