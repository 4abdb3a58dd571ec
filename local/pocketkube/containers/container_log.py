"""Container logs on disk: one file per container instance in the CRI format (`<time> <stream> <F|P> <line>`), capped in size."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 10 * 2**20  # of one file; a full file is kept once as `.1`
MAX_LINE = 16 * 2**10  # bytes; longer lines are stored in parts


class ContainerLog:
    """The log one container instance writes."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.closed = False
        self._max_bytes = max_bytes
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._partial: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def feed(self, stream: str, data: bytes) -> None:
        """Take bytes as they came out of the pipe of `stream` (stdout or stderr)."""
        *lines, rest = (self._partial.get(stream, b"") + data).split(b"\n")
        out = [record for line in lines for record in _records(stream, line)]
        while len(rest) > MAX_LINE:
            out.append(_record(stream, b"P", rest[:MAX_LINE]))
            rest = rest[MAX_LINE:]
        self._partial[stream] = rest
        if out:
            self._write(b"".join(out))

    def close(self) -> None:
        """Write what is left without a newline, and tell followers that nothing more comes."""
        for stream, rest in self._partial.items():
            if rest:
                self._write(_record(stream, b"P", rest))
        self._partial.clear()
        self._file.close()
        self.closed = True
        self._notify()

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next write, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def tail(self, max_bytes: int = 2048, max_lines: int = 80) -> str:
        """The end of the log as text, for a termination message."""
        lines = deque(read_lines(self.path), maxlen=max_lines)
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
    """Where a full log file is kept."""
    return path.with_name(path.name + ".1")


def read_lines(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(RFC 3339 time, content with its newline if the line is complete), oldest first."""
    for file in (rotated(path), path):
        try:
            with open(file, "rb") as stored:
                for line in stored:
                    yield _parse(line)
        except FileNotFoundError:
            continue


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
    """A log as `kubectl logs` wants it.

    Args:
        live: the log still being written, if any; `follow` ends when it is closed.
        tail: only the last lines (all when None).
        since: only lines at or after this time.
        limit_bytes: stop after this many bytes.
    """
    left = limit_bytes
    try:
        current = open(path, "rb")  # noqa: ASYNC230, SIM115 - local file; closed below
    except FileNotFoundError:
        return
    try:
        # Everything there now; the position in the current file is where following goes on.
        lines = [_parse(line) for line in _rotated_lines(path)]
        lines += [_parse(line) for line in current]
        if since is not None:
            lines = [entry for entry in lines if _time(entry[0]) >= since]
        if tail is not None:
            lines = lines[-tail:] if tail else []
        pending = deque(lines)
        carry = b""
        while True:
            while pending:
                when, content = pending.popleft()
                chunk = when + b" " + content if timestamps else content
                if left is not None:
                    chunk = chunk[:left]
                    left -= len(chunk)
                yield chunk
                if left == 0:
                    return
            if not follow:
                return
            ended = live is None or live.closed
            data = carry + current.read()
            *complete, carry = data.split(b"\n")
            pending.extend(_parse(line + b"\n") for line in complete)
            if pending:
                continue
            try:
                if os.fstat(current.fileno()).st_ino != os.stat(path).st_ino:  # rotated under us
                    current.close()
                    current = open(path, "rb")  # noqa: ASYNC230, SIM115 - local file; closed below
                    continue
            except FileNotFoundError:  # the pod is gone, and its folder with it
                return
            if ended or live is None:
                return
            await live.changed(5.0)
    finally:
        current.close()


def _rotated_lines(path: Path) -> Iterator[bytes]:
    try:
        with open(rotated(path), "rb") as file:
            yield from file
    except FileNotFoundError:
        return


def _records(stream: str, line: bytes) -> Iterator[bytes]:
    while len(line) > MAX_LINE:
        yield _record(stream, b"P", line[:MAX_LINE])
        line = line[MAX_LINE:]
    yield _record(stream, b"F", line)


def _record(stream: str, flag: bytes, content: bytes) -> bytes:
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
    return b"%s %s %s %s\n" % (when, stream.encode(), flag, content)


def _parse(line: bytes) -> tuple[bytes, bytes]:
    when, _, flag, content = line.rstrip(b"\n").split(b" ", 3)
    return when, content + (b"\n" if flag == b"F" else b"")


def _time(text: bytes) -> datetime:
    # fromisoformat of Python 3.11 reads six fractional digits at most.
    return datetime.fromisoformat(text.decode()[:26] + "+00:00")
