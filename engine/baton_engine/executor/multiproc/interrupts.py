"""What reaches worker processes while a step blocks them: a pipe to each, which a thread there reads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class InterruptPipes:
    """The executor's side."""

    def __init__(self, num_workers: int) -> None:
        pipes = [os.pipe() for _ in range(num_workers)]
        self.read_fds = [read for read, _ in pipes]
        """By rank, for the workers; `close` closes them here."""
        self._write_fds = [write for _, write in pipes]
        for fd in self._write_fds:
            os.set_blocking(fd, False)
        self._lock = threading.Lock()

    def send(self, nonce: str) -> None:
        """To all workers. By any thread; never blocks."""
        line = nonce.encode() + b"\n"
        with self._lock:
            for fd in self._write_fds:
                # Full: it has more to read than it needs. No reader: the worker is gone, and others hear of that.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(fd, line)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            for fd in (*self.read_fds, *self._write_fds):
                os.close(fd)
            self.read_fds, self._write_fds = [], []


def watch_interrupts(fd: int, interrupt: Callable[[str], None]) -> None:
    """The worker's side: starts the thread, which calls `interrupt` with each nonce that comes, until the pipe ends."""

    def watch() -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                try:
                    interrupt(line.strip())
                except Exception:  # the next one must still be heard
                    logger.exception("a step could not be interrupted")

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
