"""Child processes with a log file each. None outlives the thread that starts it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pocketkube.lifecycle import kill_at_end_of_parent

STOP_TIMEOUT_S = 20.0
LOG_LINES = 15


class ComponentError(Exception):
    """A component did not start or has ended; the text has the end of its log."""


class Children:
    """The running children by name.

    Args:
        logs: folder of the log files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, append: bool = False
    ) -> None:
        """Start a process.

        Args:
            append: keep the log of the process that had this name before.
        """
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._logs / f"{name}.log", "ab" if append else "wb") as log:
            # In a session of its own, so that Ctrl-C reaches only the parent, which stops its
            # children in order.
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=kill_at_end_of_parent(),
            )

    def ended(self) -> list[str]:
        """Return the names of the processes that have ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            ComponentError: one has ended.
        """
        for name in self.ended():
            code = self._processes[name].returncode
            raise ComponentError(f"{name} ended with exit code {code}\n{self.log_tail(name)}")

    def stop(self, names: Iterable[str]) -> None:
        """Send SIGTERM, and SIGKILL to those that do not end in time. Idempotent."""
        processes = [self._processes.pop(name) for name in names if name in self._processes]
        for process in processes:
            process.send_signal(signal.SIGTERM)  # a no-op for a process that has ended
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log_tail(self, name: str) -> str:
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])
