"""Run a further command in a container, for `kubectl exec`."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import subprocess
import termios
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pocketkube.containers.container_reaper import kill_all
from pocketkube.containers.process import (
    EXEC_MARKER,
    KILL_S,
    ContainerProcess,
    StartError,
    exit_code,
    on_exit,
    spawn,
)

#: Time for more output after the command has ended. Its children may keep the pipes open.
_DRAIN_S = 1.0
#: The capacity of a pipe, and the maximum size of a read.
_PIPE_BYTES = 65536


@dataclass(frozen=True)
class ExecStreams:
    """The streams that the client has requested. With `tty`, stdout also carries stderr."""

    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False


class ExecProcess:
    """A command with the environment and the working folder of a container.

    Create it with `start()`, and call `close()` at the end.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        marker: str,
        stdin: IO[bytes] | None,
        outputs: dict[str, IO[bytes] | None],
        terminal: IO[bytes] | None = None,
    ) -> None:
        self._popen = popen
        self._marker = marker
        self._stdin = stdin
        #: Open outputs: "stdout" and "stderr".
        self._outputs = {name: pipe for name, pipe in outputs.items() if pipe is not None}
        #: The master side of the terminal.
        self._terminal = terminal
        self._exited = asyncio.Event()
        #: Done `_DRAIN_S` after the end of the command.
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pipes = [pipe for pipe in (stdin, *outputs.values()) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        on_exit(popen.pid, self._on_exit)

    @classmethod
    def start(
        cls, container: ContainerProcess, argv: list[str], streams: ExecStreams
    ) -> ExecProcess:
        """Start a command in the container whose main process is `container`.

        When the container ends, the command is killed.

        Raises:
            StartError: the command was not found or could not be started.
        """
        exec_id = uuid.uuid4().hex
        environment = {**container.environment, EXEC_MARKER: exec_id}
        marker = f"{EXEC_MARKER}={exec_id}"
        if streams.tty:
            popen, terminal = _spawn_in_terminal(argv, environment, container.cwd)
            stdin = terminal if streams.stdin else None
            return cls(popen, marker, stdin, {"stdout": terminal}, terminal)
        wanted = (streams.stdin, streams.stdout, streams.stderr)
        pipes = [subprocess.PIPE if is_wanted else subprocess.DEVNULL for is_wanted in wanted]
        popen = spawn(argv, environment, container.cwd, *pipes)
        return cls(popen, marker, popen.stdin, {"stdout": popen.stdout, "stderr": popen.stderr})

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs that can be read: "stdout", "stderr", both or none."""
        return list(self._outputs)

    async def read(self, output: str) -> AsyncIterator[bytes]:
        """Yield the bytes of `output` ("stdout" or "stderr") until its end.

        Once `_DRAIN_S` has passed since the end of the command, yield at most `_PIPE_BYTES` more. A
        pipe holds no more of the command's own output, but child processes of the command may
        write without end.
        """
        fd, left = self._outputs[output].fileno(), _PIPE_BYTES
        while left > 0 and (data := await self._read(fd)):
            if self._drained.done():
                left -= len(data)
            yield data

    async def _read(self, fd: int) -> bytes:
        """Return the next bytes of an output; empty at its end."""
        loop = asyncio.get_running_loop()
        while True:
            await self._until_ready(fd, loop.add_reader, loop.remove_reader)
            try:
                return os.read(fd, _PIPE_BYTES)
            except BlockingIOError:
                if self._drained.done():
                    return b""
            except OSError:  # EIO, the end of a terminal
                return b""

    async def write(self, data: bytes) -> None:
        """Write `data` to the command's standard input, and wait until all of it is written.

        Data is dropped if the command has no standard input, has closed its standard input, or ends
        before reading the data.
        """
        if self._stdin is None or self._stdin.closed:
            return
        fd, left, loop = self._stdin.fileno(), memoryview(data), asyncio.get_running_loop()
        while left and not self._drained.done():
            await self._until_ready(fd, loop.add_writer, loop.remove_writer)
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                continue
            except OSError:  # the command has closed its standard input
                return

    async def _until_ready(
        self, fd: int, add: Callable[..., None], remove: Callable[[int], bool]
    ) -> None:
        """Wait until `fd` is ready, or until `_DRAIN_S` after the end of the command.

        Args:
            add: `loop.add_reader` to wait for data to read, or `loop.add_writer` to wait for space.
            remove: the matching `loop.remove_reader` or `loop.remove_writer`.
        """
        ready = asyncio.get_running_loop().create_future()

        def on_ready() -> None:
            remove(fd)
            ready.set_result(None)

        add(fd, on_ready)
        try:
            await asyncio.wait({ready, self._drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            remove(fd)

    def close_stdin(self) -> None:
        """Close standard input. No effect with a terminal, whose input cannot be closed alone."""
        if self._stdin is not None and self._terminal is None:
            self._stdin.close()

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the terminal, in characters."""
        if self._terminal is not None and not self._terminal.closed:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    async def wait(self) -> int:
        """Wait for the end of the command. Return its exit code."""
        await self._exited.wait()
        return exit_code(self._popen)

    async def close(self) -> None:
        """Close the streams. Kill the command and its descendants if the command still runs."""
        for pipe in self._pipes:
            pipe.close()
        if not self._exited.is_set():
            # With shield(), the processes are also killed if the caller is cancelled while
            # kill_all() waits for a free thread.
            await asyncio.shield(
                asyncio.to_thread(kill_all, {self._popen.pid}, self._marker, KILL_S)
            )

    def _on_exit(self) -> None:
        self._popen.wait()
        self._exited.set()
        asyncio.get_running_loop().call_later(_DRAIN_S, self._drained.set_result, None)


def _spawn_in_terminal(
    argv: list[str], environment: dict[str, str], cwd: Path
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a command in a new terminal. Return the process and the terminal's master side."""
    master, slave = os.openpty()
    terminal = open(master, "r+b", buffering=0)  # noqa: SIM115 - closed in close()
    try:
        in_terminal = {"TERM": "xterm", **environment}
        return spawn(argv, in_terminal, cwd, slave, slave, slave, in_terminal=True), terminal
    except StartError:
        terminal.close()
        raise
    finally:
        os.close(slave)
