"""No process of a container outlives the kubelet."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from pocketkube.containers import guardian
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.process import Guard, Process
from support.waiting import until


async def test_the_guardian_kills_processes_that_left_their_session(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    await guard.start()
    log = ContainerLog(tmp_path / "0.log")
    mark = f"35{time.time_ns() % 10**9}"
    process = Process.start(
        ["sh", "-c", f"setsid sleep {mark} & sleep {mark}"],
        dict(os.environ),
        tmp_path,
        guard,
        "c1",
        log,
    )
    marker = f"POCKETKUBE_KUBELET_ID={guard.kubelet_id}"
    await until(lambda: len(guardian.find_processes((), marker)) >= 3, "the shell and both sleeps")
    await guard.stop()
    assert guardian.find_processes((), marker) == []
    assert await process.wait(60) == 137
    await process.finish()


async def test_a_killed_guardian_is_replaced_and_kills_all_processes(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    await guard.start()
    log = ContainerLog(tmp_path / "0.log")
    # It has no environment, so only its session identifies it.
    process = Process.start(
        ["env", "-i", "sleep", "1000"], dict(os.environ), tmp_path, guard, "c1", log
    )
    first = guard._process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: guard._process.pid != first, "a new guardian")
    await guard.stop()
    assert await process.wait(60) == 137
    await process.finish()


def test_a_second_kubelet_with_the_same_state_folder_is_refused(tmp_path: Path) -> None:
    async def start_both() -> None:
        first = Guard(tmp_path)
        await first.start()
        try:
            with pytest.raises(TimeoutError, match="another kubelet uses"):
                await Guard(tmp_path).start(lock_timeout_s=0.2)
        finally:
            await first.stop()

    asyncio.run(start_both())
