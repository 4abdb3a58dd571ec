"""The loan of the transports' work: from their thread to a user of the agent that waits.

The user does the work, so that no other thread has to wake up before the user. `Holder` says who
has the work:

    holder    meaning                                                alarm
    THREAD    the thread works, or wakes up to do so                 rings
    NOBODY    nothing is left to do; the thread waits for events     rings
    NOBODY    the last user may come back; the thread waits for it   rings within AWAY_NS
    USER      a waiting user works                                   off

    THREAD -> NOBODY    nothing is left to do
    NOBODY -> USER      a user waits
    USER   -> NOBODY    it left, and nothing is left to do
    USER   -> THREAD    it left work; the alarm rings at once
    NOBODY -> THREAD    the alarm; once it rings, also an event or a timer
"""

from __future__ import annotations

import enum
import os
import threading

from baton_kv_transfer.transports.alarm import Alarm

#: A user that waits again within this time keeps the work, because waking the thread costs more.
AWAY_NS = 1_000_000


class Holder(enum.Enum):
    """The one that has the work."""

    THREAD = enum.auto()
    NOBODY = enum.auto()
    USER = enum.auto()


class WorkLoan:
    """Says who does the work. The thread has it first."""

    def __init__(self) -> None:
        self.holder = Holder.THREAD
        #: Users that wait, with or without the work.
        self.num_users = 0
        self.alarm = Alarm()
        self.alarm.set(1)
        #: Ends the thread's wait for events when a user takes the work.
        self.taken_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Held while an attribute changes.
        self._lock = threading.Lock()
        self._thread_polls = False
        self._closed = False

    def borrow(self) -> bool:
        """Let a user wait. Return whether it has the work now."""
        with self._lock:
            self.num_users += 1
            if self.holder is not Holder.NOBODY or self._closed:
                return False
            self.holder = Holder.USER
            self.alarm.set(0)
            if self._thread_polls:
                os.eventfd_write(self.taken_fd, 1)
        return True

    def give_back(self, more: bool) -> None:
        """Take the work from the user that has it. `more`: some can be done at once."""
        with self._lock:
            self.holder = Holder.THREAD if more else Holder.NOBODY
            self.alarm.set(1 if more else AWAY_NS)

    def leave(self) -> None:
        """End the wait of a user, which has no work any more."""
        with self._lock:
            self.num_users -= 1

    def rest(self) -> None:
        """Let users take the work of the thread, which now waits for events."""
        with self._lock:
            self.holder = Holder.NOBODY
            self._thread_polls = True

    def resume(self) -> bool:
        """End the thread's wait for events. Return whether it has the work; else the alarm rings.

        After `close` it returns True in any case. Then a user may have the work, too.
        """
        with self._lock:
            self._thread_polls = False
            if self.alarm.wait(0):
                self.holder = Holder.THREAD
            return self.holder is Holder.THREAD or self._closed

    def close(self) -> None:
        """Refuse further loans. The thread does not `rest` afterwards."""
        with self._lock:
            self._closed = True

    def await_user(self, timeout_s: float) -> bool:
        """Wait, after `close`, until no user has the work. Return False after the timeout."""
        with self._lock:
            lent = self.holder is Holder.USER
        return not lent or self.alarm.wait(timeout_s)

    def close_descriptors(self) -> None:
        os.close(self.taken_fd)
        self.alarm.close()
