"""How recent the reads of a reconcile must be.

Most reconciles may read from the API server's watch cache. For each kind, the cache must have
reached the newest resource version that an object or event of that kind has shown. The resource
version of a list is not used, because writes to other kinds increment it too. The cache of a kind
without events might reach such a version only after minutes. Until then, every read would wait 3 s
and fail with GATEWAY_TIMEOUT.

A reconcile reads consistently:

- before it changes members or deletes an object;
- if it is the first one of a service;
- after a failure, after a resync, and after a watch has listed its collection, because events may
  be missing.

Kinds outside MOVING_KINDS are read only by a reconcile that reads consistently, and after an event
has shown a write by another client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from baton_kube.client import KubeError

#: Resource version that any state of the watch cache satisfies.
OLDEST = "0"
#: HTTP code of the API server when its watch cache does not reach the required version in 3 s.
GATEWAY_TIMEOUT = 504
#: Kinds whose status the operator reads. Objects of other kinds change only when a client writes
#: their spec.
MOVING_KINDS = frozenset({"LLMService", "Pod", "Deployment", "Service", "HTTPRoute"})


class StaleReadError(Exception):
    """The reconcile must be repeated with consistent reads, because its reads may be stale."""


class Freshness(msgspec.Struct, frozen=True, kw_only=True):
    """How recent the reads of one reconcile must be."""

    is_consistent: bool = True
    #: Whether another client may have written objects outside MOVING_KINDS since the last
    #: reconcile.
    objects_changed: bool = True
    #: By kind: newest resource version in a read or an event. Shared by the reconciles of one
    #: service.
    versions: dict[str, str] = {}

    def of(self, kind: str) -> str | None:
        """Return the oldest resource version that a read of `kind` may show.

        None: read consistently.
        """
        return None if self.is_consistent else self.versions.get(kind, OLDEST)

    def record(self, kind: str, version: str) -> None:
        """Record the resource version of an object of `kind` from a read or an event."""
        if version.isdecimal() and int(version) > int(self.versions.get(kind, OLDEST)):
            self.versions[kind] = version

    @contextmanager
    def detect_lag(self) -> Iterator[None]:
        """Convert GATEWAY_TIMEOUT errors of requests in the `with` block to StaleReadError.

        Such an error means that the watch cache of the API server has not reached the required
        resource version. Errors of consistent reads are not converted.
        """
        try:
            yield
        except KubeError as error:
            if self.is_consistent or error.status != GATEWAY_TIMEOUT:
                raise
            raise StaleReadError from error

    def require_consistent(self) -> None:
        """Raise StaleReadError unless the reads of this reconcile are consistent."""
        if not self.is_consistent:
            raise StaleReadError
