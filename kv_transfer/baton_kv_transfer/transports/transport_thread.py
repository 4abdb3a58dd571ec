"""The work of the transports: waits on sockets, runs what others want of it and what is due, and copies in turns of one batch.

A thread does it, except while a user of the transport waits in `waiting`: then the user does what comes up, for nobody has to wake
up before it then. The thread steps in for what is left when there is news for the user, and when the user stays away.
"""

from __future__ import annotations

import enum
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
from typing import Protocol

from baton_kv_transfer.transports.mailbox import Mailbox
from baton_kv_transfer.transports.transfer import CopyError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
AWAY_S = 0.001
"""A user who waits again within this time keeps the work: waking the thread would cost more."""
HELP_S = 0.005
"""How long a user goes on with what needs more than a turn, while there is no news for it."""
MAX_PARKED_S = 1.0
"""How late something that is due may be while a user waits."""


class SteppedCopy(Protocol):
    """A copy in steps."""

    target: bytes

    @property
    def done(self) -> bool: ...

    def step(self) -> None:
        """Copy the next batch.

        Raises:
            CopyError: the source cannot be read.
        """


class Job:
    """A copy this process makes: a read of its own, or a peer's write."""

    def __init__(self, copy: SteppedCopy, finish: Callable[[str], None], owner: object) -> None:
        """
        Args:
            finish: called with the error or "".
            owner: who asked for it.
        """
        self.copy = copy
        self.finish = finish
        self.owner = owner


class _Waiting:
    """A user's time in `waiting`. A class, since entering and leaving a generator takes longer, twice per message."""

    def __init__(
        self, borrow: Callable[[], bool], leave: Callable[[bool], None], epoll: select.epoll
    ) -> None:
        self._borrow = borrow
        self._leave = leave
        self._epoll = epoll
        self._borrowed = False

    def __enter__(self) -> int | None:
        self._borrowed = self._borrow()
        return self._epoll.fileno() if self._borrowed else None

    def __exit__(self, *reason: object) -> None:
        self._leave(self._borrowed)


class _State(enum.Enum):
    """Of the thread."""

    WORKING = enum.auto()
    POLLING = enum.auto()
    PARKED = enum.auto()
    """A user does the work."""


class TransportThread:
    """`mailbox`, `waiting`, `start` and `close` are for any thread; the rest belongs to who does the work, the handlers."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self.jobs: deque[Job] = deque()
        self._handlers: dict[int, tuple[int, Callable[[], None]]] = {}
        """Events waited for and what to call, by descriptor."""
        self._progress: Callable[[], bool] = lambda: False
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._epoll = select.epoll()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._event_fd, lambda: None)
        self._kick_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Gets the thread, and nobody else, out of its poll."""
        self._news = False
        self._worker: int | None = None
        """The thread that does the work at the moment: what it submits, it runs before it waits."""
        self.mailbox = Mailbox(self._signal)
        self._work = threading.Lock()
        """Held by who does the work."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._state = _State.WORKING
        self._waits = 0
        """How many times a user began to wait: tells one time from the next."""
        self._lent = False
        """A user waits now."""
        self._users = 0
        """In `waiting`, with or without the work."""
        self._left_at = 0.0
        """When the last one ceased to."""
        self._long = False
        """The thread sleeps on, however short the user's absence."""
        self._more = False
        """The user left work that does not wait."""
        self._resume = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, at_end: Callable[[], object]) -> None:
        """`at_end`: the thread's last act, after `close` or a failure of its own."""
        self._at_end = at_end
        self._thread.start()

    def progress_also(self, progress: Callable[[], bool]) -> None:
        """Calls `progress` in every turn; it returns whether it has more to do that no descriptor tells of."""
        self._progress = progress

    def close(self) -> None:
        if self._thread.ident is None:  # never started
            self._close()
        elif self.mailbox.close():
            self._resume.set()
            self._thread.join(CLOSE_TIMEOUT_S)

    def on_news(self) -> bool:
        """There is something for users to look at: one that does the transports' work meanwhile goes back to that.

        Returns:
            Whether users are to be woken: not where it came up in the `waiting` of the only one.
        """
        self._news = True
        me = threading.get_ident()
        return self._users > 1 or me != self._worker or me == self._thread.ident

    def waiting(self) -> AbstractContextManager[int | None]:
        """See Transport.waiting."""
        return _Waiting(self._borrow, self._leave, self._epoll)

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Calls `handler` whenever something can be read, and see `watch_writable`."""
        if fd >= 0:
            self._epoll.register(fd, select.EPOLLIN)
            self._handlers[fd] = select.EPOLLIN, handler

    def watch_writable(self, fd: int, writable: bool) -> None:
        """Whether the handler is called whenever something can be written, too; nothing happens where none watches."""
        events, handler = self._handlers.get(fd, (0, None))
        wanted = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if handler is not None and events != wanted:
            self._epoll.modify(fd, wanted)
            self._handlers[fd] = wanted, handler

    def unwatch(self, fd: int) -> None:
        """Before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._serial), command))

    def take_jobs(self, of: object) -> list[Job]:
        """Removes the copies that it asked for."""
        taken = [job for job in self.jobs if job.owner is of]
        for job in taken:
            self.jobs.remove(job)
        return taken

    # -- users that wait

    def _borrow(self) -> bool:
        with self._lock:
            self._users += 1
            if self._lent or self._more or self._state is _State.WORKING or self.mailbox.closed:
                return False
            self._lent = True
            self._waits += 1
            if self._state is _State.POLLING:
                os.eventfd_write(self._kick_fd, 1)
        return True

    def _leave(self, borrowed: bool) -> None:
        if borrowed:
            self._give_back()
        with self._lock:
            self._users -= 1

    def _give_back(self) -> None:
        more = True
        until = time.monotonic() + HELP_S
        self._news = False
        try:
            with self._work:
                while more and not (self._news or self.mailbox.closed or time.monotonic() > until):
                    more = self._turn()
        except Exception as error:  # the thread's to report: who waits did not cause it
            self._failure = error
        with self._lock:
            self._lent = False
            self._left_at = time.monotonic()
            self._more = more
            resume = more or self._long
        if resume:
            self._resume.set()

    # -- the thread

    def _run(self) -> None:
        try:
            more = True
            while not self.mailbox.closed:
                if not more:
                    self._wait()
                if self._failure is not None:
                    raise self._failure
                with self._work:
                    more = self._turn()
        except Exception:
            logger.exception("the thread %s failed; its transfers end", self._thread.name)
        with self._work:
            self.mailbox.finish()  # callers that wait for an answer get it
            self._at_end()
        self._close()

    def _wait(self) -> None:
        """Until there may be work, and no user does it."""
        with self._lock:
            self._state = _State.POLLING
        poller = select.poll()
        poller.register(self._epoll.fileno(), select.POLLIN)
        poller.register(self._kick_fd, select.POLLIN)
        if any(fd == self._kick_fd for fd, _ in poller.poll(self._time_left_s(1e6) * 1000)):
            os.eventfd_read(self._kick_fd)
        asleep = False
        while not self._take_back(asleep):
            with self._lock:
                waits = self._waits
            woken = self._resume.wait(self._time_left_s(MAX_PARKED_S) if asleep else AWAY_S)
            with self._lock:
                asleep = not woken and self._lent and self._waits == waits
            if asleep and not self._time_left_s(MAX_PARKED_S):
                with self._work:
                    self._turn()
                os.eventfd_write(self._event_fd, 1)  # the user does what the turn has left

    def _take_back(self, asleep: bool) -> bool:
        """Whether the work is the thread's. If not, it is about to sleep: until it is woken if `asleep`."""
        with self._lock:
            away = not self._lent and (self._more or time.monotonic() - self._left_at >= AWAY_S)
            self._resume.clear()
            self._long = asleep
            if away or self.mailbox.closed:
                self._state, self._more = _State.WORKING, False
            else:
                self._state = _State.PARKED
            return self._state is _State.WORKING

    def _close(self) -> None:
        while True:
            with self._lock:
                lent = self._lent
                self._resume.clear()
            if not lent:
                self._epoll.close()
                os.close(self._event_fd)
                os.close(self._kick_fd)
                return
            os.eventfd_write(
                self._event_fd, 1
            )  # for a user that was woken when the last turn had used up what woke it
            if not self._resume.wait(CLOSE_TIMEOUT_S):
                return  # a user still polls these descriptors: they must not become others

    # -- the work

    def _turn(self) -> bool:
        """What there is to do at once; whether there is more."""
        self._worker = threading.get_ident()
        try:
            for fd, _ in self._epoll.poll(0):
                if fd == self._event_fd:
                    os.eventfd_read(fd)
                elif handler := self._handlers.get(fd):  # an earlier one may have closed it
                    handler[1]()
            self._copy_batch()
            self._run_due()
            self.mailbox.run()
            more = self._progress()
        finally:
            self._worker = None
        return bool(more or self.jobs or self._epoll.poll(0))

    def _signal(self) -> None:
        if threading.get_ident() != self._worker:  # whose turn ends with running what was submitted
            os.eventfd_write(self._event_fd, 1)

    def _time_left_s(self, at_most_s: float) -> float:
        return (
            min(at_most_s, max(0.0, self._later[0][0] - time.monotonic()))
            if self._later
            else at_most_s
        )

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
        if error or job.copy.done:
            job.finish(error)
        else:
            self.jobs.append(job)
