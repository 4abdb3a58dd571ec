"""Of several fetchers that share a cache, one works and the others wait for what it brings.

Only bandwidth depends on this: every fetcher writes into a folder of its own, and a rename decides. So a lock that a file system
keeps badly between machines costs a second download and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from pathlib import Path

import msgspec

BEAT_S = 2.0
DEAD_AFTER_S = 20.0
"""A holder whose heartbeat has not changed for so long, by this process's clock, is dead, frozen or cut off."""


class _Beat(msgspec.Struct):
    holder: str
    machine: str
    """Boot id of the holder's kernel: on the same one flock alone is the truth."""
    count: int


class FetchLock:
    """One try of one process for the lock at `path`. Not for use by several threads."""

    def __init__(
        self, path: Path, *, beat_s: float = BEAT_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self._path = path
        self._beat_s, self._dead_after_s = beat_s, dead_after_s
        self._me = secrets.token_hex(8)
        self._machine = boot_id()
        self._fd = -1
        self._seen: tuple[bytes, float] = (b"", time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Takes the lock if it is free, or if its holder gives no sign of life any more. Does not wait.

        Raises:
            OSError: the folder cannot be written.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            content = os.pread(fd, 4096, 0)
            if content != self._seen[0]:
                self._seen = (content, time.monotonic())
            silent = time.monotonic() - self._seen[1] >= self._dead_after_s
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if silent:  # frozen: it keeps its file, others start a new one
                    self._path.unlink(missing_ok=True)
                    self._seen = (b"", time.monotonic())
                os.close(fd)
                return False
            holder = _decode(os.pread(fd, 4096, 0))
            alive_elsewhere = holder is not None and holder.machine != self._machine and not silent
            if alive_elsewhere or not self._is_current(fd):
                os.close(fd)
                return False
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        self._fd = fd
        self._beat(0)
        self._thread = threading.Thread(target=self._keep_beating, name="lock", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """The file stays, empty: its removal would let two fetchers lock two files of one name."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _is_current(self, fd: int) -> bool:
        mine = os.fstat(fd)
        try:
            there = self._path.stat(follow_symlinks=False)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(self._beat_s):
            count += 1
            with contextlib.suppress(OSError):  # a full disk: who works fails by itself
                self._beat(count)

    def _beat(self, count: int) -> None:
        content = msgspec.json.encode(_Beat(self._me, self._machine, count))
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))


def _decode(content: bytes) -> _Beat | None:
    """None for a lock that was released, or whose holder died before its first beat."""
    try:
        return msgspec.json.decode(content, type=_Beat)
    except msgspec.DecodeError:
        return None


def boot_id() -> str:
    """Of the running kernel; containers of one machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)
