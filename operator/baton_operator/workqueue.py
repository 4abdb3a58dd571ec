"""A queue of keys: each key is worked on by one worker at a time, kept once however often it is added, and retried with
backoff when its work fails."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton_operator.kube import KubeError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
WORK_TIMEOUT_S = 300.0
"""Work that takes longer is cancelled and counts as failed."""
LONGEST_PAUSE_S = 60.0


class Key(NamedTuple):
    """Which service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


Work = Callable[[Key], Awaitable[float | None]]
"""Returns after how many seconds the key is due again; None: not by itself. Raises to be retried."""


class WorkQueue:
    """`add` from anywhere on the event loop; `run` works until cancelled.

    When the API server asks to be left alone (Retry-After), all workers pause: it means every client, not one key.

    Args:
        retried: called for each failure.
    """

    def __init__(self, work: Work, workers: int = 4, retried: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._workers = workers
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._due: set[Key] = set()
        self._working: dict[Key, float] = {}
        """Since when."""
        self._retried = retried
        self._paused_until = 0.0
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return self._queue.qsize()

    @property
    def longest_s(self) -> float:
        """How long the oldest work under way has taken so far."""
        return time.monotonic() - min(self._working.values(), default=time.monotonic())

    def add(self, key: Key) -> None:
        """Makes `key` due now. Added while it is worked on, it is worked on once more afterwards."""
        if key in self._due:
            return
        self._due.add(key)
        if key not in self._working:
            self._queue.put_nowait(key)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Makes `key` due in `delay_s`, unless an earlier timer is running."""
        loop = asyncio.get_running_loop()
        present = self._timers.get(key)
        if present is not None:
            if present.when() <= loop.time() + delay_s:
                return
            present.cancel()
        self._timers[key] = loop.call_later(delay_s, self._timer_fired, key)

    def _timer_fired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    async def run(self) -> None:
        """Works until cancelled; what is under way then is cancelled, too."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    async def _worker(self) -> None:
        while True:
            key = await self._queue.get()
            while (pause_s := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            self._due.discard(key)
            self._working[key] = time.monotonic()
            try:
                async with asyncio.timeout(WORK_TIMEOUT_S):
                    delay_s = await self._work(key)
            except Exception as error:  # whatever went wrong with one key, the others go on
                delay_s = self._backoff(key)
                self._retried()
                if isinstance(error, KubeError) and error.retry_after_s is not None:
                    pause_s = min(error.retry_after_s, LONGEST_PAUSE_S)
                    self._paused_until = max(self._paused_until, time.monotonic() + pause_s)
                    delay_s = max(delay_s, pause_s)
                log.warning(
                    "%s failed, again in %.1f s: %s",
                    key,
                    delay_s,
                    error,
                    exc_info=not isinstance(error, (KubeError, OSError)),  # those say themselves what it was
                )
            else:
                self._failures.pop(key, None)
            finally:
                del self._working[key]
            if delay_s is not None:
                self.add_after(key, delay_s)
            if key in self._due:
                self._queue.put_nowait(key)

    def _backoff(self, key: Key) -> float:
        """Doubles with every failure in a row; jittered so that keys that failed together do not return together."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 16))
        return delay * random.uniform(0.8, 1.2)
