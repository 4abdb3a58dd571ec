"""The thread of a lane: waits on sockets, runs what others want of it and what is due, and copies in turns of one batch."""

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

from baton_kv_transfer.transports.cross_memory import BatchedCopy, CopyError
from baton_kv_transfer.transports.mailbox import Mailbox

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Job:
    """A copy this process makes: a read of its own, or a peer's write."""

    def __init__(self, copy: BatchedCopy, finish: Callable[[str], None], owner: object) -> None:
        """
        Args:
            finish: called with the error or "".
            owner: who asked for it.
        """
        self.copy = copy
        self.finish = finish
        self.owner = owner


class LaneThread:
    """`mailbox`, `start` and `close` are for any thread; the rest belongs to this one."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self.jobs: deque[Job] = deque()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._poller = select.poll()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._event_fd, lambda: None)
        self.mailbox = Mailbox(lambda: os.eventfd_write(self._event_fd, 1))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, at_end: Callable[[], None]) -> None:
        """`at_end`: the thread's last act, after `close` or a failure of its own."""
        self._at_end = at_end
        self._thread.start()

    def close(self) -> None:
        if self.mailbox.close():
            self._thread.join(CLOSE_TIMEOUT_S)

    def watch(self, fd: int, handler: Callable[[], None], writable: bool = False) -> None:
        if fd >= 0:
            self._poller.register(fd, select.POLLIN | (select.POLLOUT if writable else 0))
            self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._serial), command))

    def take_jobs(self, of: object) -> list[Job]:
        """Removes the copies that it asked for."""
        taken = [job for job in self.jobs if job.owner is of]
        for job in taken:
            self.jobs.remove(job)
        return taken

    def _run(self) -> None:
        try:
            while not self.mailbox.closed:
                self._poll(0 if self.jobs else self._time_left_ms())
                self.mailbox.run()
                while self._later and self._later[0][0] <= time.monotonic():
                    heapq.heappop(self._later)[2]()
                self._copy_batch()
        except Exception:
            logger.exception("the thread %s failed; its transfers end", self._thread.name)
        self.mailbox.finish()  # callers that wait for an answer get it
        self._at_end()
        os.close(self._event_fd)

    def _time_left_ms(self) -> float | None:
        return max(0.0, self._later[0][0] - time.monotonic()) * 1000 if self._later else None

    def _poll(self, timeout_ms: float | None) -> None:
        for fd, _ in self._poller.poll(timeout_ms):
            if fd == self._event_fd:
                os.eventfd_read(fd)
            elif handler := self._handlers.get(fd):  # an earlier one may have closed it
                handler()

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
