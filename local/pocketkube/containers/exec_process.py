"""Run a further command in a container, for `kubectl exec`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
import termios
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO

from pocketkube.containers import guardian
from pocketkube.containers.process import (
    EXEC_MARKER,
    Process,
    StartError,
    exit_code,
    on_exit,
    spawn,
)

#: Time for more output after the command has ended. Its children may keep the pipes open.
_DRAIN_S = 1.0
#: The capacity of a pipe, and the maximum size of a read.
_PIPE_BYTES = 65536
#: Maximum wait for the end of processes after SIGKILL.
_KILL_S = 5.0


@dataclass(frozen=True)
class ExecStreams:
    """The streams that the client wants. With `tty`, stdout has all output."""

    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False


class ExecProcess:
    """A command with the environment and the working folder of a container.

    Create it with `start()`, and call `close()` at the end.
    """

    def __init__(self, popen: subprocess.Popen[bytes], marker: str) -> None:
        self._popen = popen
        self._marker = marker
        self._exited = asyncio.Event()
        self._stdin: asyncio.StreamWriter | None = None
        #: The master side of the terminal.
        self._terminal: IO[bytes] | None = None
        #: Open outputs: "stdout" and "stderr".
        self._outputs: dict[str, IO[bytes]] = {}
        #: Done `_DRAIN_S` after the end of the command.
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        on_exit(popen.pid, self._on_exit)

    @classmethod
    async def start(cls, container: Process, argv: list[str], streams: ExecStreams) -> ExecProcess:
        """Start a command in the container whose main process is `container`.

        The end of the container kills the command.

        Raises:
            StartError: the command was not found or could not be started.
        """
        exec_id = uuid.uuid4().hex
        environment = {**container.environment, EXEC_MARKER: exec_id}
        if streams.tty:
            return await cls._start_in_terminal(container, argv, environment, streams)
        wanted = (streams.stdin, streams.stdout, streams.stderr)
        pipes = [subprocess.PIPE if is_wanted else subprocess.DEVNULL for is_wanted in wanted]
        popen = spawn(argv, environment, container.cwd, *pipes)
        process = cls(popen, f"{EXEC_MARKER}={exec_id}")
        await process._connect(popen.stdin, {"stdout": popen.stdout, "stderr": popen.stderr})
        return process

    @classmethod
    async def _start_in_terminal(
        cls, container: Process, argv: list[str], environment: dict[str, str], streams: ExecStreams
    ) -> ExecProcess:
        environment.setdefault("TERM", "xterm")
        master, slave = os.openpty()
        terminal = open(master, "rb", buffering=0)  # noqa: ASYNC230, SIM115 - closed in close()
        try:
            popen = spawn(argv, environment, container.cwd, slave, slave, slave, in_terminal=True)
        except StartError:
            terminal.close()
            raise
        finally:
            os.close(slave)
        process = cls(popen, f"{EXEC_MARKER}={environment[EXEC_MARKER]}")
        process._terminal = terminal
        stdin = os.fdopen(os.dup(master), "wb", buffering=0) if streams.stdin else None
        await process._connect(stdin, {"stdout": terminal})
        return process

    async def _connect(self, stdin: IO[bytes] | None, outputs: dict[str, IO[bytes] | None]) -> None:
        for name, pipe in outputs.items():
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._outputs[name] = pipe
        if stdin is not None:
            loop = asyncio.get_running_loop()
            sink, protocol = await loop.connect_write_pipe(_protocol, stdin)
            self._stdin = asyncio.StreamWriter(sink, protocol, None, loop)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs: "stdout" and "stderr", or those of them that are wanted."""
        return list(self._outputs)

    async def read(self, output: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an output until its end, or until `_DRAIN_S` after the command's end.

        Children of the command may continue to write. What the command itself has written is then
        within the next `_PIPE_BYTES`, because nothing is read before the caller takes it.
        """
        fd, left = self._outputs[output].fileno(), _PIPE_BYTES
        while left > 0 and (data := await self._read(fd)):
            if self._drained.done():
                left -= len(data)
            yield data

    async def _read(self, fd: int) -> bytes:
        """Return the next bytes of an output; empty at its end."""
        while True:
            await self._until_readable(fd)
            try:
                return os.read(fd, _PIPE_BYTES)
            except BlockingIOError:
                if self._drained.done():
                    return b""
            except OSError:  # EIO, the end of a terminal
                return b""

    async def _until_readable(self, fd: int) -> None:
        """Wait until an output has bytes or ends, at most until `_drained`."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()

        def on_readable() -> None:
            loop.remove_reader(fd)
            readable.set_result(None)

        loop.add_reader(fd, on_readable)
        try:
            await asyncio.wait({readable, self._drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(fd)

    async def write(self, data: bytes) -> None:
        """Write to standard input. Input that the command does not read is dropped at its end."""
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(data)
            with contextlib.suppress(ConnectionError):
                await self._stdin.drain()

    def close_stdin(self) -> None:
        """Close standard input. A terminal has no end, so this has no effect on it."""
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
        for pipe in self._outputs.values():
            pipe.close()
        if self._stdin is not None:
            sink = self._stdin.transport
            # A closed transport cannot be aborted. A closing one may still have bytes to write.
            if sink.get_write_buffer_size() or not sink.is_closing():
                sink.abort()
        if not self._exited.is_set():
            await asyncio.to_thread(guardian.kill_all, {self._popen.pid}, self._marker, _KILL_S)

    def _on_exit(self) -> None:
        self._popen.wait()
        self._exited.set()
        asyncio.get_running_loop().call_later(_DRAIN_S, self._drained.set_result, None)


def _protocol() -> asyncio.StreamReaderProtocol:
    return asyncio.StreamReaderProtocol(asyncio.StreamReader())
