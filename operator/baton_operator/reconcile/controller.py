"""The queue of services to reconcile, with one task per service.

At most one reconcile per service and CONCURRENCY reconciles in total run at the same time. Of these
at most one reads more than MAX_READ_BYTES. A failed reconcile is retried with backoff.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from baton_kube.client import ByteBudget, KubeError, error_text
from baton_operator import logs
from baton_operator.kube.objects import reads
from baton_operator.names import Key
from baton_operator.observe.freshness import MOVING_KINDS, Freshness
from baton_operator.reconcile_errors import drop_tracebacks

logger = logging.getLogger(__name__)

CONCURRENCY = 4
#: Limits in bytes on the JSON that one reconcile reads: for most services, and for a large service.
#: Decoded JSON takes about 20 times as much memory, and a decoded LLMService up to 48 times.
MAX_READ_BYTES, MAX_LARGE_READ_BYTES = 2**20, 10 * 2**20
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0  # shortest and longest delay before a retry
TIMEOUT_S = 300.0  # a reconcile that takes longer is cancelled and counts as failed
MAX_ERROR_CHARACTERS = 1024  # of an error in the log
MAX_PAUSE_S = 60.0  # longest pause that a Retry-After can cause


class Outcome(NamedTuple):
    """The result of a successful reconcile."""

    #: Reconcile again after this many seconds, even without an event. None: wait for an event or
    #: the resync.
    revisit_s: float | None = None
    is_gone: bool = False  # the service does not exist any more


#: Takes one step towards the desired state of one service. The controller retries after an error.
Reconcile = Callable[[Key, Freshness], Awaitable[Outcome]]


@dataclass(eq=False)
class _Service:
    """The queue entry of one known service."""

    due: asyncio.Event = field(default_factory=asyncio.Event)
    #: Whether its last reconcile read more than MAX_READ_BYTES, or failed at that limit.
    is_large: bool = False
    #: Required freshness of the next reconcile.
    freshness: Freshness = field(default_factory=lambda: Freshness(versions={}))
    failures: int = 0
    began: float | None = None  # monotonic time at which the running reconcile began


class Controller:
    """Runs the queued reconciles of all known services.

    A Retry-After from the API server pauses the reconciles of all services, because the header
    applies to the whole client.

    Args:
        reconcile: takes one step towards the desired state of one service.
        retried: called after each failed reconcile.
    """

    def __init__(self, reconcile: Reconcile, retried: Callable[[], None] = lambda: None) -> None:
        self._reconcile = reconcile
        self._retried = retried
        self._services: dict[Key, _Service] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)
        #: Held during the reconcile of a large service.
        self._large = asyncio.Lock()
        self._paused_until = 0.0
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._services)

    @property
    def queue_depth(self) -> int:
        """Number of services that wait for a reconcile."""
        return sum(
            service.due.is_set() and service.began is None for service in self._services.values()
        )

    @property
    def longest_s(self) -> float:
        """Seconds for which the oldest running reconcile has run; 0 if none runs."""
        began = [service.began for service in self._services.values() if service.began is not None]
        return time.monotonic() - min(began) if began else 0.0

    async def run(self) -> None:
        """Reconcile services until cancelled. A cancellation also ends the running reconciles."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for key in self._services:
                    self._start(key)
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    def is_due(self, key: Key) -> bool:
        return key in self._services and self._services[key].due.is_set()

    def add(self, key: Key) -> None:
        """Queue a reconcile of the service. If one is running, the new one starts after it."""
        self._get(key).due.set()

    def observe(self, key: Key, kind: str, version: str, *, is_own_write: bool = False) -> None:
        """Queue a reconcile of the service, after a watch event for one of its objects.

        While a failed reconcile waits for its retry, events of the operator's own writes do not
        queue a reconcile.

        Args:
            kind: kind of the object in the event, such as Pod.
            version: resource version of the object in the event.
            is_own_write: whether this operator wrote that version.
        """
        service = self._get(key)
        service.freshness.record(kind, version)
        if kind not in MOVING_KINDS and not is_own_write:
            service.freshness = msgspec.structs.replace(service.freshness, objects_changed=True)
        # The status that reports a failure must not end the backoff.
        if not (is_own_write and service.failures):
            service.due.set()

    def add_all(self, keys: Iterable[Key] = ()) -> None:
        """Queue reconciles with consistent reads for `keys` and all known services.

        Call this method when watches may have missed events.
        """
        for key in {*keys, *self._services}:
            service = self._get(key)
            service.freshness = Freshness(versions=service.freshness.versions)
            service.due.set()

    def _get(self, key: Key) -> _Service:
        if key not in self._services:
            self._services[key] = _Service()
            self._start(key)
        return self._services[key]

    def _start(self, key: Key) -> None:
        if self._tasks is not None:
            self._tasks.create_task(
                self._run_service(key, self._services[key]), name=f"reconcile {key}"
            )

    async def _run_service(self, key: Key, service: _Service) -> None:
        """Run the queued reconciles of one service until it is deleted."""
        logs.service.set(key)
        revisit_s: float | None = None
        while self._services.get(key) is service:
            if service.failures and revisit_s is not None:
                # Events shorten a backoff, but not below its shortest delay.
                await asyncio.sleep(FIRST_BACKOFF_S)
                revisit_s = max(0.0, revisit_s - FIRST_BACKOFF_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(revisit_s):
                    await service.due.wait()
            service.due.set()  # also after a timeout: `queue_depth` counts services that are due
            # A large service waits for other large ones before it takes a slot.
            async with self._large if service.is_large else nullcontext(), self._slots:
                while (pause_s := self._paused_until - time.monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                revisit_s = await self.reconcile(key)

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one service now. Return seconds until the next reconcile.

        None: the next reconcile waits for an event or the resync. A service whose reads exceed
        MAX_READ_BYTES is queued again, as a large service.
        """
        service = self._get(key)
        freshness, versions = service.freshness, service.freshness.versions
        service.freshness = Freshness(is_consistent=False, objects_changed=False, versions=versions)
        service.due.clear()
        service.began = time.monotonic()
        logs.operation.set("")
        budget = ByteBudget(MAX_LARGE_READ_BYTES if service.is_large else MAX_READ_BYTES)
        reads.set(budget)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                outcome = await self._reconcile(key, freshness)
        except Exception as error:  # an error in one service must not stop the others
            service.freshness = Freshness(versions=versions)
            outgrew = self._queue_if_large(service, budget)
            delay_s = None if outgrew else self._back_off(key, service, error)
            drop_tracebacks(error)
            return delay_s
        finally:
            service.began = None
        if self._queue_if_large(service, budget):  # a step ignored the error of its read
            return None
        service.failures = 0
        if freshness.is_consistent:  # other reconciles skip some reads
            service.is_large = budget.num_read > MAX_READ_BYTES
        if outcome.is_gone and not service.due.is_set():
            del self._services[key]
        return outcome.revisit_s

    def _queue_if_large(self, service: _Service, budget: ByteBudget) -> bool:
        """Queue the service again, as a large one, if its reads have exceeded MAX_READ_BYTES.

        Returns:
            Whether the service was queued. False for a service that is large already.
        """
        if service.is_large or not budget.is_exceeded:
            return False
        service.is_large = True
        service.freshness = Freshness(versions=service.freshness.versions)
        service.due.set()
        return True

    def _back_off(self, key: Key, service: _Service, error: Exception) -> float:
        """Log the failure, and return seconds until the retry.

        The delay doubles with each consecutive failure. A Retry-After can lengthen the delay.
        """
        service.failures += 1
        self._retried()
        delay_s = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(service.failures - 1, 16))
        delay_s *= random.uniform(1.0, 1.4)  # spreads the retries of services that failed together
        if isinstance(error, KubeError) and error.retry_after_s is not None:
            pause_s = min(error.retry_after_s, MAX_PAUSE_S)
            if "admission webhook" not in str(error):  # a webhook refuses one object
                self._paused_until = max(self._paused_until, time.monotonic() + pause_s)
            delay_s = max(delay_s, pause_s)
        is_defect = not isinstance(error, (KubeError, OSError))
        logger.warning(
            "reconcile of %s failed, retrying in %.1f s: %s",
            key,
            delay_s,
            error_text(error)[:MAX_ERROR_CHARACTERS],
            exc_info=is_defect,
        )
        return delay_s
