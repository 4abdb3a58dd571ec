"""The body of `GET /health` on a pod's http port: how far it is on its way to serving, and with whom it can exchange KV blocks."""

from __future__ import annotations

import msgspec

from baton_protocol.kv_compatibility import KVCompatibility

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class LoadProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of the model that are there already."""

    done_bytes: int
    total_bytes: int
    """0: not known yet."""

    def __str__(self) -> str:
        """`23 % of 14.0 GiB`: a text that changes a hundred times at most. Empty while nothing is known."""
        if self.total_bytes <= 0:
            return ""
        size, unit = next(
            ((size, unit) for size, unit in _UNITS if self.total_bytes >= size), (1, "bytes")
        )
        return (
            f"{100 * self.done_bytes // self.total_bytes} % of {self.total_bytes / size:.1f} {unit}"
        )


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of `GET /health`."""

    reason: str
    """One CamelCase word; Fetching and Loading are stations on the way."""
    message: str
    progress: LoadProgress | None = None
    kv: KVCompatibility | None = None
    """Of an engine that serves and has a KV role."""
    kv_bytes: dict[str, int] = {}
    """Bytes of KV that an engine sent and received, by transport and lane: `ucx tcp/lo`."""
    error: str = ""
    """What failed last of something that is tried again, and has not got on since."""
