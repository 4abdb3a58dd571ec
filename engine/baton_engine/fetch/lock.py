"""A lock between fetchers that share a cache: one fetcher downloads, and other fetchers wait.

The lock only saves bandwidth. Every fetcher writes into its own folder, and the first rename wins.
On a file system that does not share locks between machines, a model may be downloaded twice.
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

#: Interval between two heartbeats of the lock's holder.
BEAT_S = 2.0
#: If the heartbeat of the lock's holder does not change for this time, another fetcher may take the
#: lock.
DEAD_AFTER_S = 20.0


class _Beat(msgspec.Struct):
    """A heartbeat: the content of the lock file while a fetcher holds the lock."""

    holder: str
    #: Boot id of the holder's kernel. A fetcher on the same kernel needs no heartbeat, because the
    #: kernel releases the flock when the holder dies.
    machine: str
    #: Number of earlier heartbeats of this holder.
    count: int


class FetchLock:
    """The lock file at `path`, with a heartbeat of its holder. Not thread-safe."""

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
        """Try to take the lock without waiting.

        The lock can be taken if it is free or if its holder's heartbeat has stopped. If a frozen
        holder keeps the file locked, the first call only removes the file. The next call can then
        take the lock.

        Returns:
            Whether this process holds the lock.

        Raises:
            OSError: the folder is not writable.
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
                if silent:  # the holder is frozen and keeps the file locked; use a new file
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
        """Release the lock and truncate the lock file.

        The file is not removed. Otherwise two fetchers could lock two files with the same name.
        """
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
            with contextlib.suppress(OSError):  # on a full disk the download itself fails
                self._beat(count)

    def _beat(self, count: int) -> None:
        content = msgspec.json.encode(_Beat(self._me, self._machine, count))
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))


def _decode(content: bytes) -> _Beat | None:
    """Decode a heartbeat from the content of the lock file.

    Returns:
        The heartbeat. None if the lock was released, or if its holder died before the first
        heartbeat.
    """
    try:
        return msgspec.json.decode(content, type=_Beat)
    except msgspec.DecodeError:
        return None


def boot_id() -> str:
    """Return the boot id of the running kernel, which all containers of a machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)
