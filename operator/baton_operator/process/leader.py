"""Leader election with a Lease (coordination.k8s.io/v1), by the rules of client-go.

`Election` makes the decisions without requests, and `Elector` sends the requests.

Clocks of two processes are never compared. A candidate takes the Lease when its own clock shows
that no renewal was read for the Lease's duration. The holder stops earlier: after RENEW_SHARE of
that duration, counted from when the last successful renewal was sent. If the clocks run at about
the same rate, two processes never hold the Lease at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import msgspec

from baton_kube.client import KubeError, Object, error_text
from baton_operator.kube.objects import Kube

logger = logging.getLogger(__name__)

RENEW_SHARE = 2 / 3  # of the Lease's duration: the holder stops this long after its last renewal
RETRY_SHARE = 2 / 15  # of the Lease's duration: interval between two reads, or two renewals


class LeaseLostError(Exception):
    """Another process may hold the Lease now, so this process must exit."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a stored Lease, without its name."""

    holder: str = msgspec.field(name="holderIdentity", default="")  # empty: the Lease is free
    duration_s: float = msgspec.field(name="leaseDurationSeconds", default=0)
    acquired: str = msgspec.field(name="acquireTime", default="")
    renewed: str = msgspec.field(name="renewTime", default="")
    transitions: int = msgspec.field(name="leaseTransitions", default=0)
    #: Resource version. Empty: the Lease does not exist.
    version: str = msgspec.field(name="resourceVersion", default="")


#: A clock that also runs while the machine is suspended.
monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class Election:
    """The state of one candidate in the election, and its decisions.

    Args:
        identity: an id that no other process has or had.
        lease_s: seconds without a renewal after which another candidate may take the Lease.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, identity: str, lease_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.identity = identity
        self.lease_s = lease_s
        self.now = clock
        #: The Lease as last read or written. None: it does not exist, or was not read yet.
        self.seen: Record | None = None
        self._seen_at = float("-inf")
        self._held_until = float("-inf")

    @property
    def held_s(self) -> float:
        """Seconds for which this process still holds the Lease; 0 or less if it does not."""
        return self._held_until - self.now()

    @property
    def write_timeout_s(self) -> float:
        """Timeout in seconds for a write that begins now; 0 if this process must not write.

        The timeout ends before another process can take the Lease.
        """
        held_s = self.held_s
        return held_s + self.lease_s * (1 - RENEW_SHARE) / 2 if held_s > 0 else 0.0

    @property
    def other(self) -> str:
        """Identity of the process that held the Lease at the last read, if not this process.

        Empty: this process held the Lease, or the Lease was free or did not exist.
        """
        return self.seen.holder if self.seen and self.seen.holder != self.identity else ""

    def observe(self, record: Record | None) -> None:
        """Record the Lease that was read. None: the Lease does not exist."""
        if record != self.seen:
            self.seen, self._seen_at = record, self.now()
        if record is None or record.holder != self.identity:
            self.resign()

    def may_take(self) -> bool:
        """Return whether this process may write itself into the Lease as the holder.

        True if the Lease does not exist, is free, has expired or names this process.
        """
        return (
            self.seen is None
            or not self.other
            or self.now() >= self._seen_at + self.seen.duration_s
        )

    def record_write(self, record: Record, sent_at: float) -> None:
        """Record a successful write of the Lease.

        Args:
            sent_at: time of `clock` just before the request was sent.
        """
        self.seen, self._seen_at = record, self.now()
        self._held_until = sent_at + self.lease_s * RENEW_SHARE

    def resign(self) -> None:
        self._held_until = float("-inf")


class Elector:
    """Takes and renews the Lease `namespace`/`name`.

    Args:
        kube: a client that may write even while this process does not hold the Lease.
    """

    def __init__(self, kube: Kube, election: Election, namespace: str, name: str) -> None:
        self._kube = kube
        self._election = election
        self._namespace = namespace
        self._name = name

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        logged = ""
        while True:
            try:
                await self._read()
                if self._election.may_take() and await self._write():
                    logger.info(
                        "this operator holds the Lease %s/%s as %s",
                        self._namespace,
                        self._name,
                        self._election.identity,
                    )
                    return
                other = self._election.other
                state = f"{other} holds it" if other else "another process has just written it"
            except (KubeError, OSError) as error:
                state = f"it cannot be read or written: {error_text(error)}"
            if state != logged:
                logger.info(
                    "this operator waits for the Lease %s/%s: %s",
                    self._namespace,
                    self._name,
                    state,
                )
                logged = state
            await self._pause()

    async def keep(self) -> None:
        """Renew the Lease until it is lost.

        Raises:
            LeaseLostError: another process may hold the Lease.
        """
        election = self._election
        while election.held_s > 0:
            await self._pause()
            try:
                if not await self._write():
                    await self._read()
            except (KubeError, OSError) as error:
                logger.warning(
                    "the Lease %s/%s was not renewed; without a renewal the operator exits in "
                    "%.1f s: %s",
                    self._namespace,
                    self._name,
                    election.held_s,
                    error_text(error),
                )
        other = election.other
        raise LeaseLostError(
            f"{other} holds the Lease" if other else "the Lease could not be renewed in time"
        )

    async def release(self) -> None:
        """Free the Lease, so that another process can take it without waiting for its expiry.

        After this call the process must not write.
        """
        if self._election.held_s <= 0:
            return
        self._election.resign()
        try:
            await self._write(release=True)
        except (KubeError, OSError) as error:
            logger.warning(
                "the Lease %s/%s was not released, so the next operator waits until it expires: %s",
                self._namespace,
                self._name,
                error_text(error),
            )

    async def _pause(self) -> None:
        await asyncio.sleep(self._election.lease_s * RETRY_SHARE * random.uniform(1.0, 1.2))

    async def _read(self) -> None:
        async with asyncio.timeout(self._election.lease_s * RENEW_SHARE):
            found = await self._kube.read("Lease", self._namespace, self._name)
        self._election.observe(_record(found) if found else None)

    async def _write(self, *, release: bool = False) -> bool:
        """Write this process into the Lease as the holder or, if `release` is set, free the Lease.

        Return False if another process has changed the Lease since the last read.
        """
        election, seen = self._election, self._election.seen or Record()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_renewal = seen.holder == election.identity
        record = Record(
            holder="" if release else election.identity,
            duration_s=1 if release else math.ceil(election.lease_s),
            acquired=seen.acquired if is_renewal and seen.acquired else now,
            renewed=now,
            transitions=seen.transitions + (1 if seen.version and not is_renewal else 0),
            version=seen.version,
        )
        spec = msgspec.to_builtins(record)
        metadata = {
            "name": self._name,
            "namespace": self._namespace,
            "resourceVersion": spec.pop("resourceVersion"),
        }
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        sent_at = election.now()
        try:
            async with asyncio.timeout(election.lease_s * RENEW_SHARE):
                stored = await (
                    self._kube.replace(lease) if seen.version else self._kube.create(lease)
                )
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        if not release:
            election.record_write(_record(stored), sent_at)
        return True


def _record(lease: Object) -> Record:
    fields = {**lease.get("spec", {}), "resourceVersion": lease["metadata"]["resourceVersion"]}
    return msgspec.convert(
        {name: value for name, value in fields.items() if value is not None}, Record
    )
