"""How a changed spec reaches the pods: `.spec.updateStrategy`."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from baton_operator.api_types import ApiStruct

PERCENT = r"^(100|[0-9]{1,2})%$"

IntOrPercent = Annotated[int, Meta(ge=0, le=256)] | Annotated[str, Meta(pattern=PERCENT)]
"""A number of pods, or a share of the replicas such as `25%`."""


class RollingUpdate(ApiStruct, frozen=True):
    """How the members of one group are replaced by those of a new revision."""

    max_surge: Annotated[
        IntOrPercent,
        Meta(
            description="Pods beyond replicas that may exist meanwhile: a number, or a share of replicas such as 25%, rounded up."
        ),
    ] = 1
    max_unavailable: Annotated[
        IntOrPercent,
        Meta(
            description="How many fewer than replicas may serve meanwhile: a number, or a share of replicas, rounded down. If "
            "both are zero, it is one."
        ),
    ] = 0
    surge_timeout_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86400,
            description="A new pod for which no node has had room for so long takes the place of an old one, which drains first: "
            "one fewer serves meanwhile. Give it more where new nodes are started on demand.",
        ),
    ] = 30


class UpdateStrategy(ApiStruct, frozen=True):
    """How pods are replaced when what they are made of changes. Those of a role whose pods would be the same are left alone."""

    prefill: RollingUpdate = RollingUpdate()
    decode: RollingUpdate = RollingUpdate()


def surge_and_unavailable(strategy: RollingUpdate, replicas: int) -> tuple[int, int]:
    """Both as numbers of pods; never both zero, for then nothing could be replaced."""
    surge = math.ceil(_pods(strategy.max_surge, replicas))
    unavailable = min(math.floor(_pods(strategy.max_unavailable, replicas)), replicas)
    return surge, unavailable if surge or unavailable else 1


def _pods(value: int | str, replicas: int) -> float:
    return value if isinstance(value, int) else int(value.removesuffix("%")) * replicas / 100
