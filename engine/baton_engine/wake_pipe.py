"""WakePipe: wakes a thread that polls sockets."""

from __future__ import annotations

import contextlib
import socket


class WakePipe:
    """A pipe that wakes a polling thread. The thread polls `reader` together with its sockets."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Make `reader` readable. Callable from any thread and from signal handlers."""
        with contextlib.suppress(OSError):  # full: a wakeup is pending; closed: the thread ended
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Discard the pending wakeups, so that `reader` is no longer readable."""
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()
