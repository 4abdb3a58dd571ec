"""`autoscaling` of the two groups of members, and what their status says of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api_types import ApiStruct

Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]


class AutoscalingBounds(ApiStruct, kw_only=True, frozen=True):
    """What both groups have in common."""

    min_replicas: Annotated[
        int, Meta(ge=0, le=256, description="0: the group goes when nobody has wanted anything for idleSeconds.")
    ] = 1
    max_replicas: Annotated[int, Meta(ge=1, le=256, description="The group never has more pods.")]
    percentile: Annotated[
        int, Meta(ge=50, le=99, description="Of the latencies that are compared with the targets, over a minute.")
    ] = 95
    tolerance_percent: Annotated[
        int,
        Meta(ge=0, le=50, description="A target is missed so far above it, and met with a margin so far below it."),
    ] = 10
    scale_up_stabilization_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="The group grows only to what was recommended all that time.")
    ] = 30
    scale_down_stabilization_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="The group shrinks only to what was enough all that time.")
    ] = 300
    idle_seconds: (
        Annotated[
            int,
            Meta(ge=1, le=86400, description="With minReplicas 0: the group goes after so long without a request."),
        ]
        | None
    ) = None


class PrefillAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """The operator sizes the group itself, by the time to the first token. replicas is the size that it begins with."""

    ttft_milliseconds: Annotated[
        Milliseconds, Meta(description="Target: from the engine's receipt of a request to its first token.")
    ]
    busy_percent: Annotated[
        int,
        Meta(ge=1, le=100, description="The group does not shrink so far that its engines would be busier than this."),
    ] = 80


class DecodeAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """The operator sizes the group itself, by the time between tokens. replicas is the size that it begins with."""

    itl_milliseconds: Annotated[Milliseconds, Meta(description="Target: from one token of a sequence to the next.")]
    ttft_milliseconds: (
        Annotated[
            Milliseconds,
            Meta(description="Target for the first token while there are no prefill pods; unset: it does not count."),
        ]
        | None
    ) = None
    kv_usage_percent: Annotated[
        int, Meta(ge=1, le=100, description="Target for the KV blocks in use, so that sequences can grow.")
    ] = 80
    hold_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=3600,
                description="With minReplicas 0: the gateway holds a request so long while the first pod starts, 300 if "
                "unset; then it answers 503 with Retry-After. Longer than the model takes to load.",
            ),
        ]
        | None
    ) = None


DEFAULT_HOLD_SECONDS = 300


class AutoscalingStatus(ApiStruct, kw_only=True, frozen=True):
    """What the autoscaler decided last for the group."""

    size: Annotated[int, Meta(ge=0, description="Of the group, by its decision; spec's replicas does not count.")]
    recommended: Annotated[
        int, Meta(ge=0, description="What the measurements ask for, before stabilisation, steps and bounds.")
    ]
    reason: Annotated[str, Meta(min_length=1, max_length=1024, description="One word for the message.")]
    message: Annotated[str, Meta(max_length=32768, description="The decision and its figures.")]
    last_scale_time: (
        Annotated[str, Meta(description="When the size changed last.", extra_json_schema={"format": "date-time"})]
        | None
    ) = None
