"""Child processes, each with a log file. A child ends when the thread that started it ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pocketkube.lifecycle import kill_at_end_of_parent

STOP_TIMEOUT_S = 20.0  # time from SIGTERM to SIGKILL
LOG_LINES = 15  # number of log lines in an error message


class ComponentError(Exception):
    """A component of the cluster did not start, or has ended."""


class Children:
    """A set of named child processes.

    Args:
        logs: folder of the log files. The log of the child `name` is `{name}.log`.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, append: bool = False
    ) -> None:
        """Start a child process.

        Args:
            append: append to an existing log file instead of replacing the file.
        """
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._logs / f"{name}.log", "ab" if append else "wb") as log:
            # The child has its own session, so that Ctrl-C reaches only the parent. The parent
            # then stops its children in order.
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
            ComponentError: a process has ended. The message includes the end of its log.
        """
        for name in self.ended():
            code = self._processes[name].returncode
            raise ComponentError(f"{name} ended with exit code {code}\n{self.log_tail(name)}")

    def stop(self, names: Iterable[str]) -> None:
        """Send SIGTERM to the named processes, and wait until they have ended. Idempotent.

        A process that still runs after `STOP_TIMEOUT_S` gets SIGKILL.
        """
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
        """Return the last LOG_LINES lines of the log of the child `name`."""
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])
