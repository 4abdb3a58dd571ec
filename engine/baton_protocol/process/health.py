"""Body of the responses to `GET /health` and `GET /ready` on a pod's HTTP port."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton_protocol.kv_compatibility import KVCompatibility

#: Upper bound of durations in replies, in seconds. The operator subtracts a duration from a time,
#: which a larger duration would overflow.
_MAX_S = 1e9
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class LoadProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a model's download or loading, in bytes."""

    done_bytes: int
    #: 0: not known yet.
    total_bytes: int

    def __str__(self) -> str:
        """Return a text such as `23 % of 14.0 GiB`; empty while the total is not known."""
        if self.total_bytes <= 0:
            return ""
        size, unit = next(
            ((size, unit) for size, unit in _UNITS if self.total_bytes >= size), (1, "bytes")
        )
        return (
            f"{100 * self.done_bytes // self.total_bytes} % of {self.total_bytes / size:.1f} {unit}"
        )


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of the responses to `GET /health` and `GET /ready` on a pod's HTTP port."""

    #: One CamelCase word. Fetching and Loading mean that the pod does not serve yet.
    reason: str
    message: str
    progress: LoadProgress | None = None
    #: Set by a serving engine with a KV role.
    kv: KVCompatibility | None = None
    #: Bytes of KV sent and received, by transport, mechanism and device, such as `ucx tcp/lo`.
    kv_bytes: dict[str, int] = {}
    #: Error of the last failed attempt to fetch or load the model; empty once an attempt makes
    #: progress.
    error: str = ""
    #: In replies to `GET /ready`: seconds since the engine was last paused or asleep. None: it has
    #: not been paused or asleep since its start.
    resumed_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_S)] | None = None
