"""A timer with a file descriptor. Python's own `os.timerfd_create` needs Python 3.13."""

from __future__ import annotations

import ctypes as c
import os
import select
import struct
import time

#: struct itimerspec: interval and first expiration, each in seconds and nanoseconds.
_SPEC = struct.Struct("4l")
#: PyDLL keeps the GIL during a call. These calls do not block, so they need not release the GIL.
_libc = c.PyDLL(None, use_errno=True)


class TimerFD:
    """A timer that stays expired until it is set again. Only one thread may call `wait`."""

    def __init__(self) -> None:
        """Create a timer that is off.

        Raises:
            OSError: the process has no free file descriptor.
        """
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(c.get_errno(), "timerfd_create failed")
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)

    def set(self, delay_ns: int) -> None:
        """Make the timer expire after `delay_ns`; 0 turns the timer off."""
        spec = _SPEC.pack(0, 0, *divmod(delay_ns, 10**9))
        _libc.timerfd_settime(self._fd, 0, spec, None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the timer has expired; return False after the timeout."""
        return bool(self._poller.poll(timeout_s * 1000))

    def close(self) -> None:
        os.close(self._fd)
