"""A child process of `baton serve`, whose output is printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass

from pocketkube.lifecycle import kill_at_end_of_parent

_LINE_BYTES = 2**20  # longest line of a child's output that is printed


@dataclass
class ChildProcess:
    """A child process. Its output is printed with the child's name before each line.

    FATAL lines are not printed here, because for a wrong model the engine and the gateway each
    write a FATAL line. `baton serve` prints the FATAL line of the child that failed first.
    """

    name: str
    process: asyncio.subprocess.Process
    last_line: str = ""

    def __post_init__(self) -> None:
        self._output = asyncio.create_task(self._print_output())

    @classmethod
    async def start(cls, name: str, command: list[str], env: dict[str, str]) -> ChildProcess:
        """Start `command` with this process's environment, extended by `env`."""
        # In a session of its own, so that Ctrl-C reaches only this process, which ends the children
        # in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,
            preexec_fn=kill_at_end_of_parent(),
        )
        return cls(name, process)

    async def _print_output(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # the line is longer than _LINE_BYTES
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            if text.strip():
                self.last_line = text
            if text.startswith("FATAL "):
                continue
            print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    async def wait(self) -> int:
        """Wait until the child has ended and its output is printed. Return the exit code.

        The exit code is negative if a signal ended the child.
        """
        code = await self.process.wait()
        await asyncio.wait([self._output], timeout=1.0)  # a grandchild may hold the pipe open
        return code

    def signal(self, signum: int) -> None:
        """Send a signal to the child, unless the child has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM to the child, and wait until it has ended.

        If the child has not ended after `timeout_s` seconds, send SIGKILL to its process group.
        """
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            print_message(f"the {self.name} has not ended within {timeout_s:g} s: killing it")
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the child's process group, unless the child has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class ChildEndedError(Exception):
    """Raised when a child process fails, or ends although it should still run."""

    def __init__(self, child: ChildProcess, code: int) -> None:
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        super().__init__(f"the {child.name} {how}")
        self.child = child
        self.code = code


def print_message(text: str) -> None:
    """Print a message of `baton serve` to standard error."""
    print(f"baton serve: {text}", file=sys.stderr, flush=True)
