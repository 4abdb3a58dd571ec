"""Container logs on disk, one file per container instance.

The format is that of the CRI: `<time> <stream> <F|P> <line>`. Rotation limits the size.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from pocketkube.lifecycle import wait_up_to

#: Maximum size of a log file. A full file is renamed to `.1`.
MAX_BYTES = 10 * 2**20
#: Maximum length of a line in bytes. Longer lines are stored in parts.
MAX_LINE = 16 * 2**10


class ContainerLog:
    """Writes the log of one container instance."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.closed = False
        self._max_bytes = max_bytes
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._partial: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def feed(self, stream: str, data: bytes) -> None:
        """Append the complete lines of `data`, which the container wrote to `stream`.

        An incomplete last line is kept until its rest arrives. Lines longer than MAX_LINE are
        written in parts.

        Args:
            stream: stdout or stderr.
            data: the bytes that were read.
        """
        *lines, rest = (self._partial.get(stream, b"") + data).split(b"\n")
        out = []
        for line in lines:
            *parts, last = _parts(line)
            out += [*(_record(stream, b"P", part) for part in parts), _record(stream, b"F", last)]
        *parts, self._partial[stream] = _parts(rest)
        out += [_record(stream, b"P", part) for part in parts]
        if out:
            self._write(b"".join(out))

    def close(self) -> None:
        """Write the incomplete last line, and close the file.

        Calls of `stream_log()` that follow the log then return.
        """
        for stream, rest in self._partial.items():
            if rest:
                self._write(_record(stream, b"P", rest))
        self._partial.clear()
        self._file.close()
        self.closed = True
        self._notify()

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next write to the log or for its close, at most for `timeout_s`."""
        await wait_up_to(timeout_s, self._changed)

    def tail(self, max_bytes: int = 2048) -> str:
        """Return the end of the log as text: at most 80 lines, and at most `max_bytes` bytes."""
        lines = deque([*_read(rotated(self.path)), *_read(self.path)], maxlen=80)
        return b"".join(content for _, content in lines)[-max_bytes:].decode("utf-8", "replace")

    def _write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._max_bytes:
            self._file.close()
            os.replace(self.path, rotated(self.path))
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._file.write(data)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def rotated(path: Path) -> Path:
    """Return the path of the rotated log: `path` is renamed to it when the file is full."""
    return path.with_name(path.name + ".1")


def _read(file: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield (RFC 3339 time, content) for each record of `file`; nothing if the file is missing.

    The content of a complete line ends with a newline.
    """
    with contextlib.suppress(FileNotFoundError), open(file, "rb") as stored:
        yield from map(_parse, stored)


async def stream_log(
    path: Path,
    live: ContainerLog | None,
    *,
    follow: bool = False,
    tail: int | None = None,
    since: datetime | None = None,
    timestamps: bool = False,
    limit_bytes: int | None = None,
) -> AsyncIterator[bytes]:
    """Yield the lines of a log as `kubectl logs` prints them; nothing if the file is missing.

    Args:
        path: the log file of one container instance.
        live: the `ContainerLog` that writes the file; None if the log is complete.
        follow: wait for further lines until `live` is closed.
        tail: number of existing lines to yield, counted from the end; None for all.
        since: leave out lines before this time.
        timestamps: begin each line with its time.
        limit_bytes: stop after this many bytes.
    """
    left = limit_bytes
    async with contextlib.aclosing(_entries(path, live, follow, tail, since)) as entries:
        async for when, content in entries:
            chunk = when + b" " + content if timestamps else content
            if left is not None:
                chunk = chunk[:left]
                left -= len(chunk)
            yield chunk
            if left == 0:
                return


async def _entries(
    path: Path, live: ContainerLog | None, follow: bool, tail: int | None, since: datetime | None
) -> AsyncGenerator[tuple[bytes, bytes], None]:
    """Yield (RFC 3339 time, content) for each line that `stream_log()` formats."""
    try:
        current = open(path, "rb")  # noqa: ASYNC230, SIM115 - local file; closed below
    except FileNotFoundError:
        return
    try:
        # Read all lines that exist now. The file position is where following continues.
        lines = [*_read(rotated(path)), *map(_parse, current)]
        if since is not None:
            lines = [entry for entry in lines if _time(entry[0]) >= since]
        if tail is not None:
            lines = lines[-tail:] if tail else []
        while True:
            for line in lines:
                yield line
            if not follow:
                return
            ended = live is None or live.closed
            lines = list(map(_parse, current))
            if lines:
                continue
            try:
                is_rotated = os.fstat(current.fileno()).st_ino != os.stat(path).st_ino
                if is_rotated:
                    current.close()
                    current = open(path, "rb")  # noqa: ASYNC230, SIM115 - local file; closed below
                    continue
            except FileNotFoundError:  # the pod's folder has been removed
                return
            if ended or live is None:
                return
            await live.changed(5.0)
    finally:
        current.close()


def _parts(line: bytes) -> list[bytes]:
    """Cut a line into one or more parts of at most MAX_LINE bytes each."""
    return [line[start : start + MAX_LINE] for start in range(0, len(line) or 1, MAX_LINE)]


def _record(stream: str, flag: bytes, content: bytes) -> bytes:
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
    return b"%s %s %s %s\n" % (when, stream.encode(), flag, content)


def _parse(line: bytes) -> tuple[bytes, bytes]:
    when, _, flag, content = line.rstrip(b"\n").split(b" ", 3)
    return when, content + (b"\n" if flag == b"F" else b"")


def _time(text: bytes) -> datetime:
    # fromisoformat of Python 3.11 reads at most six fractional digits.
    return datetime.fromisoformat(text.decode()[:26] + "+00:00")
