"""Suspends a process and waits until it stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import eventually


def suspend(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until all its threads have stopped.

    The kernel stops a thread when the thread next runs, so until then it could still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _is_stopped(pid), f"all threads of process {pid} to stop")


def _is_stopped(pid: int) -> bool:
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
