"""Wait for conditions, with a deadline and a message that names the missing condition.

For all tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def eventually(
    probe: Callable[[], T], what: str, timeout_s: float = 60.0, *, every_s: float = 0.02
) -> T:
    """Call `probe` until it returns a true value, and return the value.

    An AssertionError of `probe` counts as false. The failure shows the last value or error.

    Raises:
        AssertionError: no value was true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        last: object = None
        try:
            if value := probe():
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen: {last}")
        time.sleep(every_s)


async def until(
    probe: Callable[[], Any], what: str, timeout_s: float = 60.0, *, every_s: float = 0.02
) -> Any:
    """Call `probe`, which may be a coroutine function, until its result is true. Return the result.

    Raises:
        AssertionError: no result was true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, (
            f"not within {timeout_s:g} s: {what}; last seen: {value}"
        )
        await asyncio.sleep(every_s)


def suspend(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until all its threads have stopped.

    The kernel stops a thread when the thread next runs, so until then it could still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _is_stopped(pid), f"all threads of process {pid} to stop")


def _is_stopped(pid: int) -> bool:
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
