"""The thread that does the work of an agent's transports: sockets, commands, timers and copies.

Several copies take turns, one batch at a time. A *user* is another thread that waits for the agent
in `waiting`. A user may do the work instead of the transports' thread (see `progress_handoff`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton_kv_transfer.transports.command_queue import CommandQueue
from baton_kv_transfer.transports.progress_handoff import ProgressHandoff
from baton_kv_transfer.transports.transfer import CopyError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
#: Maximum time for which a user that leaves `waiting` does the transports' work. The user stops
#: earlier when a transfer has ended or a notification has arrived.
USER_TURN_S = 0.005
#: How late a timer may be called while a user waits, in seconds.
MAX_PARKED_S = 1.0


class SteppedCopy(Protocol):
    """Interface for a copy of memory of any length. Each `step` copies one batch."""

    target: bytes

    @property
    def is_done(self) -> bool: ...

    def step(self) -> None:
        """Copy the next batch.

        Raises:
            CopyError: the source memory cannot be read.
        """


@dataclass(slots=True, eq=False)
class CopyJob:
    """A copy that this process makes, for a read of its own or for a write of a peer."""

    copy: SteppedCopy
    #: Called at the end with the error; "" if there is none.
    finish: Callable[[str], None]
    #: The link or client that requested the copy.
    owner: object


class _Waiting:
    """The context manager of `TransportThread.waiting`.

    On entry, the calling thread takes the transports' work, unless another thread has the work. The
    value of `with` is the descriptor to wait for; None if the caller did not take the work. On
    exit, a caller that took the work does the work. This is a class because a context manager made
    from a generator function would be slower.
    """

    def __init__(self, thread: TransportThread) -> None:
        self._thread = thread

    def __enter__(self) -> int | None:
        self._has_work = self._thread._handoff.enter()
        return self._thread._epoll.fileno() if self._has_work else None

    def __exit__(self, *reason: object) -> None:
        if self._has_work:
            self._thread._handoff.hand_back(self._thread._work_as_user())
        self._thread._handoff.leave()


class TransportThread:
    """The thread that all transports of an agent share.

    Any thread may use `commands`, `waiting`, `on_event`, `start` and `close`. After `start`, only
    handlers, commands, timers and copies may call the other methods. Handlers, commands, timers and
    copies run in the thread that does the work, see `progress_handoff`.
    """

    def __init__(self, name: str) -> None:
        """Prepare the thread without starting it.

        Args:
            name: name of the thread.
        """
        self.jobs: deque[CopyJob] = deque()
        #: By file descriptor: the epoll events to wait for, and the handler.
        self._handlers: dict[int, tuple[int, Callable[[], None]]] = {}
        self._progress: Callable[[], bool] = lambda: False
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._epoll = select.epoll()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._event_fd, lambda: None)
        self._has_event = False
        #: Ident of the thread that does the work now. A command from this thread needs no signal,
        #: because the thread runs all commands at the end of its turn.
        self._worker: int | None = None
        self.commands = CommandQueue(self._signal)
        #: Held during each turn of the work.
        self._work = threading.Lock()
        self._handoff = ProgressHandoff()
        #: Exception that was raised while a user did the work. The thread reports it.
        self._failure: Exception | None = None
        #: Why the thread ended; empty while it runs, and after `close`.
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, at_end: Callable[[], object]) -> None:
        """Start the thread.

        Args:
            at_end: the last function that the thread calls, after `close` or a failure.
        """
        self._at_end = at_end
        self._thread.start()

    def progress_also(self, progress: Callable[[], bool]) -> None:
        """Make every turn of the work also call `progress`. Only one function can be set.

        Args:
            progress: the function. It returns whether it can do more work without waiting for an
                event.
        """
        self._progress = progress

    def close(self) -> None:
        if self._thread.ident is None:  # never started
            self._close()
        elif self.commands.close():
            self._handoff.close()  # after closing the queue: the thread does not call `rest` again
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error(
                    "the thread %s did not end within %.0f s", self._thread.name, CLOSE_TIMEOUT_S
                )

    def on_event(self) -> bool:
        """Record that a transfer has ended or a notification has arrived.

        A user that does the work then leaves `waiting`.

        Returns:
            Whether the caller must wake the users. False: the calling thread is the only user.
        """
        self._has_event = True
        me = threading.get_ident()
        return self._handoff.num_users > 1 or me != self._worker or me == self._thread.ident

    def waiting(self) -> AbstractContextManager[int | None]:
        """Return a context manager for a thread that waits for events. See `Agent.waiting`."""
        return _Waiting(self)

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` each time the descriptor is readable.

        `watch_writable` adds calls when the descriptor is writable.
        """
        if fd >= 0:
            self._epoll.register(fd, select.EPOLLIN)
            self._handlers[fd] = select.EPOLLIN, handler

    def watch_writable(self, fd: int, writable: bool) -> None:
        """Set whether the handler is also called when the descriptor is writable.

        Nothing happens if the descriptor has no handler.
        """
        events, handler = self._handlers.get(fd, (0, None))
        wanted = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if handler is not None and events != wanted:
            self._epoll.modify(fd, wanted)
            self._handlers[fd] = wanted, handler

    def unwatch(self, fd: int) -> None:
        """Remove the handler of a descriptor. Call this before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        """Call `command` after `delay_s` seconds, in the thread that does the work."""
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._serial), command))

    def take_jobs(self, owner: object) -> list[CopyJob]:
        """Remove the copy jobs of `owner` from `jobs`, and return them."""
        taken = [job for job in self.jobs if job.owner is owner]
        for job in taken:
            self.jobs.remove(job)
        return taken

    # Waiting users

    def _work_as_user(self) -> bool:
        """Do the work for a user that leaves `waiting`, and return whether work is left.

        Stop at the first event (see `on_event`), at `close`, or after USER_TURN_S seconds.
        """
        more = True
        until = time.monotonic() + USER_TURN_S
        self._has_event = False
        try:
            with self._work:
                while more and not (
                    self._has_event or self.commands.closed or time.monotonic() > until
                ):
                    more = self._turn()
        except Exception as error:  # the transports' thread reports the error, not the user
            self._failure = error
        return more

    # The thread

    def _run(self) -> None:
        try:
            more = True
            while not self.commands.closed:
                if not more:
                    self._wait()
                if self._failure is not None:
                    raise self._failure
                with self._work:
                    more = self._turn()
        except Exception as error:
            logger.exception(
                "the thread %s of the KV transports failed: all KV transfers of this engine fail, "
                "and so do later ones; restart the engine",
                self._thread.name,
            )
            self.failure = f"the thread {self._thread.name} failed: {error!r}; restart the engine"
        with self._work:
            # No user may begin to poll descriptors that are about to be closed.
            self._handoff.close()
            self.commands.finish()  # so that no caller waits for an answer without end
            self._at_end()
        self._close()

    def _wait(self) -> None:
        """Wait for an event or a timer, then until no user does the work (see `progress_handoff`).

        If a timer is due while a user waits, do one turn of the work and wake the user.
        """
        self._handoff.rest()
        poller = select.poll()
        poller.register(self._epoll.fileno(), select.POLLIN)
        taken_fd = self._handoff.taken_fd
        poller.register(taken_fd, select.POLLIN)
        if any(fd == taken_fd for fd, _ in poller.poll(self._time_left_s(1e6) * 1000)):
            os.eventfd_read(taken_fd)
        while not self._handoff.resume():
            has_expired = self._handoff.reclaim_timer.wait(self._time_left_s(MAX_PARKED_S))
            if not has_expired and not self._time_left_s(MAX_PARKED_S):
                with self._work:
                    self._turn()
                os.eventfd_write(self._event_fd, 1)  # wakes the user, which does the rest

    def _close(self) -> None:
        # Wake a user that still waits. The last turn may have read the event that was to wake it.
        os.eventfd_write(self._event_fd, 1)
        if not self._handoff.await_user(CLOSE_TIMEOUT_S):
            return  # a user still polls these descriptors, so their numbers must not be reused
        self._epoll.close()
        os.close(self._event_fd)
        self._handoff.close_descriptors()

    # The work

    def _turn(self) -> bool:
        """Do one turn of the work: events, a batch of one copy, due timers and commands.

        Returns:
            Whether more work can be done without waiting for an event.
        """
        self._worker = threading.get_ident()
        try:
            for fd, _ in self._epoll.poll(0):
                if fd == self._event_fd:
                    os.eventfd_read(fd)
                elif handler := self._handlers.get(fd):  # None: an earlier handler unwatched it
                    handler[1]()
            self._copy_batch()
            self._run_due()
            self.commands.run()
            more = self._progress()
        finally:
            self._worker = None
        return bool(more or self.jobs or self._epoll.poll(0))

    def _signal(self) -> None:
        if threading.get_ident() != self._worker:  # a worker runs commands at the end of its turn
            os.eventfd_write(self._event_fd, 1)

    def _time_left_s(self, at_most_s: float) -> float:
        first = self._later[:1]  # a slice, because another thread may remove the only timer now
        return min(at_most_s, max(0.0, first[0][0] - time.monotonic())) if first else at_most_s

    def _run_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def _copy_batch(self) -> None:
        if not self.jobs:
            return
        job = self.jobs.popleft()
        error = ""
        try:
            job.copy.step()
        except CopyError as failure:
            error = str(failure)
        if error or job.copy.is_done:
            job.finish(error)
        else:
            self.jobs.append(job)
