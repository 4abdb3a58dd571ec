"""No process of a container outlives the kubelet."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.container_reaper import find_processes
from pocketkube.containers.process import ContainerProcess, ContainerReaper
from support.waiting import until


async def test_the_reaper_kills_processes_that_left_their_session(tmp_path: Path) -> None:
    reaper = ContainerReaper(tmp_path)
    await reaper.start()
    log = ContainerLog(tmp_path / "0.log")
    mark = f"35{time.time_ns() % 10**9}"
    process = ContainerProcess.start(
        ["sh", "-c", f"setsid sleep {mark} & sleep {mark}"],
        dict(os.environ),
        tmp_path,
        reaper,
        "c1",
        log,
    )
    marker = f"POCKETKUBE_KUBELET_ID={reaper.kubelet_id}"
    await until(lambda: len(find_processes((), marker)) >= 3, "the shell and both sleeps")
    await reaper.stop()
    assert find_processes((), marker) == []
    assert await process.wait(60) == 137
    await process.finish()


async def test_a_killed_reaper_is_replaced_and_kills_all_processes(tmp_path: Path) -> None:
    reaper = ContainerReaper(tmp_path)
    await reaper.start()
    log = ContainerLog(tmp_path / "0.log")
    # It has no environment, so only its session identifies it.
    process = ContainerProcess.start(
        ["env", "-i", "sleep", "1000"], dict(os.environ), tmp_path, reaper, "c1", log
    )
    first = reaper._process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: reaper._process.pid != first, "a new reaper")
    await reaper.stop()
    assert await process.wait(60) == 137
    await process.finish()


def test_a_second_kubelet_with_the_same_state_folder_is_refused(tmp_path: Path) -> None:
    async def start_both() -> None:
        first = ContainerReaper(tmp_path)
        await first.start()
        try:
            with pytest.raises(TimeoutError, match="another kubelet uses"):
                await ContainerReaper(tmp_path).start(lock_timeout_s=0.2)
        finally:
            await first.stop()

    asyncio.run(start_both())
