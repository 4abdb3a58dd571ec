"""Pipes through which the executor interrupts worker processes during a step.

Each worker process has one pipe, and a thread that reads from the pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class InterruptPipes:
    """One pipe per worker, through which the executor interrupts the worker's step."""

    def __init__(self, num_workers: int) -> None:
        pipes = [os.pipe() for _ in range(num_workers)]
        #: The workers' ends, by rank. `close` closes them in this process.
        self.read_fds = [read for read, _ in pipes]
        self._write_fds = [write for _, write in pipes]
        for fd in self._write_fds:
            os.set_blocking(fd, False)
        self._lock = threading.Lock()

    def send(self, nonce: str) -> None:
        """Interrupt the steps of all workers. Callable from any thread. Never blocks.

        Args:
            nonce: nonce of the generation to interrupt. Empty: any generation.
        """
        line = nonce.encode() + b"\n"
        with self._lock:
            for fd in self._write_fds:
                # A full pipe holds an interrupt already. A pipe without reader has no worker.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(fd, line)

    def close(self) -> None:
        """Close both ends of all pipes. Idempotent."""
        with self._lock:
            for fd in (*self.read_fds, *self._write_fds):
                os.close(fd)
            self.read_fds, self._write_fds = [], []


def watch_interrupts(fd: int, interrupt: Callable[[str], None]) -> None:
    """Start a thread that reads nonces from the pipe `fd` and calls `interrupt` with each nonce."""

    def watch() -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                try:
                    interrupt(line.strip())
                except Exception:  # later interrupts must still be read
                    logger.exception(
                        "the current step could not be interrupted; it may wait for other engines "
                        "until the exchange times out (parallel.collective_timeout_s)"
                    )

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
