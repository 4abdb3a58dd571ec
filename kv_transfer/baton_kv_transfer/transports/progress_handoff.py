"""Hands the transports' work to a user: another thread that waits for the agent.

The work is what UCX calls progress: it moves transfers forward. A waiting user does the work
itself, so that no other thread has to wake up first. The `Holder` of the work has these states:

    holder    meaning                                                reclaim timer
    THREAD    the thread works, or wakes up to do so                 expired
    NONE      no work is left; the thread waits for events           expired
    NONE      a user has just left and may soon wait again           expires within AWAY_NS
    USER      a waiting user works                                   off

    THREAD -> NONE      no work is left
    NONE   -> USER      a user begins to wait
    USER   -> NONE      the user leaves, and no work is left
    USER   -> THREAD    the user leaves while work is left; the reclaim timer expires at once
    NONE   -> THREAD    an event or a timer has woken the thread, and the reclaim timer has expired
"""

from __future__ import annotations

import enum
import os
import threading

from baton_kv_transfer.transports.timer_fd import TimerFD

#: A user that waits again within this time gets the work again, and the thread need not wake up.
AWAY_NS = 1_000_000


class Holder(enum.Enum):
    """The thread that has the transports' work: the transports' thread, a waiting user, or none."""

    THREAD = enum.auto()
    NONE = enum.auto()
    USER = enum.auto()


class ProgressHandoff:
    """Records which thread does the transports' work. At first, the transports' thread does it.

    A user is another thread that waits for the agent, and may do the work while it waits.
    """

    def __init__(self) -> None:
        self.holder = Holder.THREAD
        #: Number of waiting users, with or without the work.
        self.num_users = 0
        #: While it is expired, the transports' thread may take the work.
        self.reclaim_timer = TimerFD()
        self.reclaim_timer.set(1)
        #: Event descriptor that ends the thread's wait for events when a user takes the work.
        self.taken_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Held while an attribute changes.
        self._lock = threading.Lock()
        self._thread_polls = False
        self._closed = False

    def enter(self) -> bool:
        """Count the caller as a waiting user. Return whether the caller must do the work now."""
        with self._lock:
            self.num_users += 1
            if self.holder is not Holder.NONE or self._closed:
                return False
            self.holder = Holder.USER
            self.reclaim_timer.set(0)
            if self._thread_polls:
                os.eventfd_write(self.taken_fd, 1)
        return True

    def hand_back(self, more: bool) -> None:
        """Give up the work. Only the user that has the work calls this.

        Args:
            more: whether work is left that can be done without waiting for an event. If so, the
                transports' thread takes the work at once.
        """
        with self._lock:
            self.holder = Holder.THREAD if more else Holder.NONE
            self.reclaim_timer.set(1 if more else AWAY_NS)

    def leave(self) -> None:
        """Stop counting the caller as a waiting user.

        A caller that has the work must call `hand_back` first.
        """
        with self._lock:
            self.num_users -= 1

    def rest(self) -> None:
        """Let users take the work. The transports' thread calls this before it waits for events."""
        with self._lock:
            self.holder = Holder.NONE
            self._thread_polls = True

    def resume(self) -> bool:
        """Take the work for the transports' thread if the reclaim timer has expired.

        The thread calls this after its wait for events.

        Returns:
            Whether the thread may work now. If False, wait for the reclaim timer and call again.
            After `close`, the result is always True, even if a user still does the work.
        """
        with self._lock:
            self._thread_polls = False
            if self.reclaim_timer.wait(0):
                self.holder = Holder.THREAD
            return self.holder is Holder.THREAD or self._closed

    def close(self) -> None:
        """Hand no work to users any more.

        After this call, the transports' thread must not call `rest`.
        """
        with self._lock:
            self._closed = True

    def await_user(self, timeout_s: float) -> bool:
        """Wait until no user does the work; return False after the timeout. Call `close` first."""
        with self._lock:
            is_handed_off = self.holder is Holder.USER
        return not is_handed_off or self.reclaim_timer.wait(timeout_s)

    def close_descriptors(self) -> None:
        os.close(self.taken_fd)
        self.reclaim_timer.close()
