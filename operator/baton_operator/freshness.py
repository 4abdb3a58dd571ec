"""How fresh the reads of a reconcile must be, which follows from what the watches have shown of the service.

Most reconciles only find that nothing is to be done. For these the API server's watch cache is enough, if it is not older than the
newest event of each kind. Kinds that change only when somebody writes them are not read at all while no event shows such a write.
Whatever acts on members or deletes something reads consistently first. So does the first reconcile of a service, and one after a
list of a watch, a failure or the resync interval, because then events may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from baton_kube.client import KubeError

OLDEST = "0"  # resource version that every cache is at least as new as
GATEWAY_TIMEOUT = 504  # HTTP code of an API server whose cache did not catch up within a few seconds
#: Kinds whose status the operator reads. Objects of other kinds change only when somebody writes them.
MOVING_KINDS = frozenset({"LLMService", "Pod", "Deployment", "Service", "HTTPRoute"})


class StaleReadError(Exception):
    """The reconcile would act on reads from a cache. Repeat it with consistent reads."""


class Freshness(msgspec.Struct, frozen=True, kw_only=True):
    """How new the reads of one reconcile must be."""

    is_consistent: bool = True
    #: Whether objects of kinds that do not move by themselves may have been written since the last reconcile.
    objects_changed: bool = True
    #: Newest resource version that an event or a read showed, by kind. Shared by the reconciles of one service.
    versions: dict[str, str] = {}

    def of(self, kind: str) -> str | None:
        """Return the version that reads of `kind` must not be older than. None: read consistently."""
        return None if self.is_consistent else self.versions.get(kind, OLDEST)

    def record(self, kind: str, version: str) -> None:
        """Record that an event or a read showed `version` of `kind`."""
        if not version.isdigit() or int(version) > int(self.versions.get(kind, OLDEST)):
            self.versions[kind] = version

    @contextmanager
    def covers_lag(self) -> Iterator[None]:
        """Raises StaleReadError if the API server's cache does not catch up with the version that a read inside asks for."""
        try:
            yield
        except KubeError as error:
            if self.is_consistent or error.status != GATEWAY_TIMEOUT:
                raise
            raise StaleReadError from error

    def require_consistent(self) -> None:
        """Raises StaleReadError if reads may come from a cache."""
        if not self.is_consistent:
            raise StaleReadError
