"""How fresh the reads of a reconcile must be, given the events of the watches.

Most reconciles find nothing to do. For them the API server's watch cache is enough, if it is not
older than the newest object or event of each kind that was seen. The resource version of a list is
not used as this bound, because it counts writes to all kinds. The cache of a kind without events
may reach it only after minutes. Until then, the API server waits 3 s and answers GATEWAY_TIMEOUT.

Kinds outside MOVING_KINDS are not read at all unless an event shows a write by another client. A
reconcile that acts on members or deletes an object reads consistently first. So does the first
reconcile of a service. After a failure, a resync or a watch that lists again, events may be
missing, so the next reconcile also reads consistently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from baton_kube.client import KubeError

#: Resource version that any state of the watch cache satisfies.
OLDEST = "0"
#: HTTP code if the cache did not reach the required version within a few seconds.
GATEWAY_TIMEOUT = 504
#: Kinds whose status the operator reads. Objects of other kinds change only when a client writes
#: their spec.
MOVING_KINDS = frozenset({"LLMService", "Pod", "Deployment", "Service", "HTTPRoute"})


class StaleReadError(Exception):
    """The reconcile would act on reads from a cache. Repeat it with consistent reads."""


class Freshness(msgspec.Struct, frozen=True, kw_only=True):
    """How new the reads of one reconcile must be."""

    is_consistent: bool = True
    #: Whether another client may have written objects outside MOVING_KINDS since the last
    #: reconcile.
    objects_changed: bool = True
    #: Newest resource version of an object or event that was seen, by kind. Shared by the
    #: reconciles of one service.
    versions: dict[str, str] = {}

    def of(self, kind: str) -> str | None:
        """Return the version that reads of `kind` must not be older than.

        None: read consistently.
        """
        return None if self.is_consistent else self.versions.get(kind, OLDEST)

    def record(self, kind: str, version: str) -> None:
        """Record that an event or a read showed an object of `kind` with this version."""
        if version.isdecimal() and int(version) > int(self.versions.get(kind, OLDEST)):
            self.versions[kind] = version

    @contextmanager
    def detect_lag(self) -> Iterator[None]:
        """Raise StaleReadError if the watch cache lags behind the required version."""
        try:
            yield
        except KubeError as error:
            if self.is_consistent or error.status != GATEWAY_TIMEOUT:
                raise
            raise StaleReadError from error

    def require_consistent(self) -> None:
        """Raise StaleReadError if reads may come from a cache."""
        if not self.is_consistent:
            raise StaleReadError
