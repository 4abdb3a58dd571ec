"""Which of several operators works: the one that holds a Lease (coordination.k8s.io/v1), by the rules of client-go.

`Election` decides, without requests and with a clock of its caller; `Elector` makes the requests. Nobody compares clocks: a
candidate takes over when it has seen no renewal for the Lease's duration, on its own clock. The holder counts from before it sent
its last renewal, which is before anybody saw it, and for a shorter time. So while clocks run at about the same rate, no two
believe that they hold it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator.kube import Kube

log = logging.getLogger(__name__)

RENEW_SHARE = 2 / 3
"""Of the Lease's duration: so long after a renewal its holder goes on without another one."""
RETRY_SHARE = 2 / 15
"""Of the Lease's duration: between two looks, or two renewals."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


class LeaseLostError(Exception):
    """Another process may hold the Lease now: this one must end."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A Lease as it is stored."""

    holder: str
    """Empty: nobody."""
    duration_s: float
    acquired: str | None = None
    renewed: str | None = None
    transitions: int = 0
    version: str = ""
    """The object's resource version."""


def monotonic() -> float:
    """Seconds that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """One candidate's view.

    Args:
        identity: unlike that of every other process, past ones included.
        lease_s: for how long a holder that is not heard of keeps others away.
        clock: seconds, monotonic.
    """

    def __init__(self, identity: str, lease_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.identity = identity
        self.lease_s = lease_s
        self._clock = clock
        self._seen: Record | None = None
        self._seen_at = float("-inf")
        self._held_until = float("-inf")

    @property
    def seen(self) -> Record | None:
        return self._seen

    @property
    def held_s(self) -> float:
        """For how long from now this process may believe that it holds the Lease; 0 or less: it does not."""
        return self._held_until - self._clock()

    @property
    def may_write_s(self) -> float:
        """How long a write that starts now may take: it must have ended before anybody else can hold the Lease."""
        held_s = self.held_s
        return held_s + self.lease_s * (1 - RENEW_SHARE) / 2 if held_s > 0 else 0.0

    def now(self) -> float:
        return self._clock()

    def observe(self, record: Record | None) -> None:
        """The Lease as it was read; None: there is none."""
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        if record is None or record.holder != self.identity:
            self._held_until = float("-inf")

    def may_take(self) -> bool:
        """Whether to write a record of our own over the one seen last, or to create one."""
        seen = self._seen
        if seen is None or seen.holder in ("", self.identity):
            return True
        return self._clock() >= self._seen_at + seen.duration_s

    def wrote(self, record: Record, sent_at: float) -> None:
        """Our record was stored; `sent_at`: a moment before the request for it left."""
        self._seen, self._seen_at = record, self._clock()
        self._held_until = sent_at + self.lease_s * RENEW_SHARE

    def resign(self) -> None:
        self._held_until = float("-inf")


class Elector:
    """Takes and keeps the Lease `namespace`/`name`. `kube` must let it write at any time."""

    def __init__(self, kube: Kube, election: Election, namespace: str, name: str) -> None:
        self._kube = kube
        self._election = election
        self._namespace = namespace
        self._name = name
        self._retry_s = election.lease_s * RETRY_SHARE

    async def acquire(self) -> None:
        """Returns once this process holds the Lease."""
        told = ""
        while True:
            try:
                await self._look()
                if self._election.may_take() and await self._write():
                    log.info("holds the Lease %s/%s as %s", self._namespace, self._name, self._election.identity)
                    return
                seen = self._election.seen
                state = f"{seen.holder} holds the Lease" if seen and seen.holder else "the Lease is being taken"
            except (KubeError, OSError, TimeoutError) as error:
                state = f"the Lease cannot be read or written: {error or type(error).__name__}"
            if state != told:
                log.info("waiting: %s", state)
                told = state
            await self._pause()

    async def keep(self) -> None:
        """Renews the Lease until it is lost. Raises LeaseLostError."""
        while self._election.held_s > 0:
            await self._pause()
            try:
                if not await self._write():
                    await self._look()
            except (KubeError, OSError, TimeoutError) as error:
                log.warning(
                    "the Lease was not renewed, %.1f s left: %s", self._election.held_s, error or type(error).__name__
                )
        seen = self._election.seen
        other = seen.holder if seen and seen.holder != self._election.identity else ""
        raise LeaseLostError(f"{other} holds the Lease" if other else "the Lease could not be renewed in time")

    async def release(self) -> None:
        """Lets another process take the Lease at once. Nothing may be written after this."""
        if self._election.held_s <= 0:
            return
        self._election.resign()
        try:
            await self._write(release=True)
        except (KubeError, OSError, TimeoutError) as error:
            log.warning("the Lease was not released: %s", error or type(error).__name__)

    async def _pause(self) -> None:
        await asyncio.sleep(self._retry_s * random.uniform(1.0, 1.2))

    async def _look(self) -> None:
        async with asyncio.timeout(self._election.lease_s * RENEW_SHARE):
            found = await self._kube.read("Lease", self._namespace, self._name)
        self._election.observe(_record(found) if found else None)

    async def _write(self, *, release: bool = False) -> bool:
        """Stores our record over the version seen last. False if that was not the newest."""
        election, seen = self._election, self._election.seen
        now = datetime.now(UTC).strftime(_TIME)
        ours = seen is not None and seen.holder == election.identity
        record = Record(
            holder="" if release else election.identity,
            duration_s=1 if release else election.lease_s,
            acquired=seen.acquired if seen and ours else now,
            renewed=now,
            transitions=seen.transitions + (0 if ours else 1) if seen else 0,
            version=seen.version if seen else "",
        )
        sent_at = election.now()
        try:
            async with asyncio.timeout(election.lease_s * RENEW_SHARE):
                lease = self._lease(record)
                stored = await (self._kube.replace(lease) if seen else self._kube.create(lease))
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        if not release:
            election.wrote(_record(stored), sent_at)
        return True

    def _lease(self, record: Record) -> Object:
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if record.version:
            metadata["resourceVersion"] = record.version
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": math.ceil(record.duration_s),
            "acquireTime": record.acquired,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _record(lease: Object) -> Record:
    spec = lease.get("spec") or {}
    return Record(
        holder=spec.get("holderIdentity") or "",
        duration_s=spec.get("leaseDurationSeconds") or 0,
        acquired=spec.get("acquireTime"),
        renewed=spec.get("renewTime"),
        transitions=spec.get("leaseTransitions") or 0,
        version=lease["metadata"]["resourceVersion"],
    )
