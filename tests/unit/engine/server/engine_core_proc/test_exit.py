"""How an engine process ends: the drain after SIGTERM, and configuration errors."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from baton_protocol.engine_messages import ErrorCode
from support.engine.engine_process import DEADLINE_S, collect, connect, request, tokens

if TYPE_CHECKING:
    pass


async def test_sigterm_drains_running_requests_and_exits_with_0(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.02")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 50))
        await anext(stream)
        engine.process.send_signal(signal.SIGTERM)
        assert len(tokens(await collect(stream))) == 49
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 0


def test_sigterm_while_the_model_loads_ends_the_process_with_0(start) -> None:
    engine = start(BATON_FAKE_LOAD_S="30")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(25) == 0


@pytest.mark.parametrize(("drain_timeout_s", "is_paused"), [("0.3", False), ("60", True)])
async def test_requests_that_cannot_end_within_the_drain_timeout_end_with_draining(
    start, drain_timeout_s, is_paused
) -> None:
    engine = start("--drain-timeout-s", drain_timeout_s, BATON_FAKE_STEP_S="0.05")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 200))
        await anext(stream)
        if is_paused:  # paused requests cannot end at all
            await client.call("pause", "keep")
        engine.process.send_signal(signal.SIGTERM)
        last = (await collect(stream))[-1]
        assert last.error_code is ErrorCode.DRAINING
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"model": {"path": "/x"}, "nonsense": 1}', "FATAL InvalidConfig: .*nonsense"),
        (
            '{"model": {"path": "/x"}, "cache": {"block_size": "big"}}',
            r"FATAL InvalidConfig: .*cache\.block_size",
        ),
        (
            '{"model": {"path": "/x"}, "scheduler": {"max_num_seqs": 0}}',
            "FATAL InvalidConfig: .*max_num_seqs",
        ),
        (
            '{"model": {"path": "/x"}, "kv_transfer": {"lease_s": 0}}',
            r"FATAL InvalidConfig: .*kv_transfer\.lease_s",
        ),
        (
            '{"model": {"path": "/does/not/exist"}, "engine_port": 0, "http_port": 0}',
            "FATAL ModelNotFound: .*/does/not/exist",
        ),
    ],
)
def test_configuration_errors_end_with_code_78_and_one_fatal_line(
    tmp_path, content, reason
) -> None:
    config = tmp_path / "engine.json"
    config.write_text(content)
    ended = subprocess.run(
        [sys.executable, "-m", "baton_engine.cli", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 78, ended.stderr
    assert re.fullmatch(reason + ".*", ended.stderr.splitlines()[-1])
