"""A timer as a descriptor to poll. `os.timerfd_create` needs Python 3.13."""

from __future__ import annotations

import ctypes as c
import os
import select
import struct
import time

#: struct itimerspec: interval and first expiration, each in seconds and nanoseconds.
_SPEC = struct.Struct("4l")
#: Calls without the release of the GIL, which another thread might then take: they do not block.
_libc = c.PyDLL(None, use_errno=True)


class Alarm:
    """Rings some time after it was set, and until it is set again. Only one thread may wait."""

    def __init__(self) -> None:
        """Create an alarm that never rings.

        Raises:
            OSError: no descriptor is left.
        """
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(c.get_errno(), "timerfd_create failed")
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)

    def set(self, delay_ns: int) -> None:
        """Ring after `delay_ns`; with 0, never."""
        spec = _SPEC.pack(0, 0, *divmod(delay_ns, 10**9))
        _libc.timerfd_settime(self._fd, 0, spec, None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings; return False after the timeout."""
        return bool(self._poller.poll(timeout_s * 1000))

    def close(self) -> None:
        os.close(self._fd)
