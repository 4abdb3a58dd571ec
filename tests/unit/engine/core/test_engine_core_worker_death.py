"""`kill -9` of a real engine, and of its real worker process, with a real (tiny) model."""

from __future__ import annotations

import asyncio
import re
import time

import psutil
import pytest

from baton_engine.checkpoint import create_checkpoint
from baton_protocol.client import EngineDeadError
from support.engine.engine_process import DEADLINE_S, collect, connect, request, wait_for


@pytest.mark.parametrize(
    ("victim", "reason"),
    [("worker", r"worker.*(killed|signal|SIGKILL|-9)"), ("engine", "connection lost")],
)
async def test_kill_9_gives_every_waiting_client_a_reason_within_5_s(
    start, tmp_path, victim, reason
):
    path = create_checkpoint(
        tmp_path / "model",
        "qwen3",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        vocab_size=512,
        seed=3,
    )
    engine = start(
        *(
            "--model",
            str(path),
            "--executor",
            "multiproc",
            "--device",
            "cpu",
            "--num-threads",
            "1",
            "--dtype",
            "float32",
        ),
        *("--num-blocks", "200", "--block-size", "16"),
    )
    wait_for(lambda: "serves on port" in engine.text, "READY in the log", engine, deadline_s=120)
    async with await connect(engine) as one, await connect(engine) as two:
        streams = [
            client.add(request(f"r{i}", [1, 2, 3], 3000)) for i, client in enumerate((one, two))
        ]
        for stream in streams:
            await anext(stream)
        (worker,) = psutil.Process(engine.process.pid).children()
        started = time.monotonic()
        (worker if victim == "worker" else engine.process).kill()
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert time.monotonic() - started < 5
        for result in results:
            assert isinstance(result, EngineDeadError), result
            assert re.search(reason, str(result)), result
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == (
            1 if victim == "worker" else -9
        )
        await asyncio.to_thread(worker.wait, DEADLINE_S)  # nobody stays behind
