"""`spec.prefill`, `spec.decode` and `spec.updateStrategy`."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from baton_operator.api.field_types import (
    ApiStruct,
    Count,
    Milliseconds,
    Percent,
    Quantity,
    Resources,
    Template,
    Time,
)
from baton_operator.api.spec_engine import Engine

DEFAULT_HOLD_SECONDS = 300

IntOrPercent = (
    Annotated[int, Meta(ge=0, le=256)] | Annotated[str, Meta(pattern=r"^(100|[0-9]{1,2})%$")]
)
Replicas = Annotated[int, Meta(ge=0, le=256)]
StabilizationSeconds = Annotated[int, Meta(ge=0, le=3600)]


class PrefillParallelism(ApiStruct, frozen=True):
    """How the model is split across the devices of one prefill pod."""

    #: Tensor-parallel size: number of workers that share each layer, with one device each. Prefill
    #: and decode may have different sizes. It must divide the number of the model's attention
    #: heads. It must divide the number of KV heads, or be a multiple of it.
    tensor: Annotated[int, Meta(ge=1, le=64)] = 1


class Rebalance(ApiStruct, frozen=True):
    """How an expert-parallel group moves experts from busy ranks to others. Used with expert.

    The load of a rank is the number of tokens that the routers send to its experts. Ranks keep
    serving while experts move.
    """

    enabled: bool = True  #: false: experts move only when ranks join or leave, and on request.
    #: Experts move if the busiest rank's load is this many percent above the mean load, on average
    #: over the sparse layers. A step waits for the busiest rank of each layer.
    threshold_percent: Annotated[int, Meta(ge=1, le=10_000)] = 20
    #: The load is measured over this time, and experts move at most once in it. With too few tokens
    #: to measure, the time is extended.
    min_interval_seconds: Annotated[int, Meta(ge=10, le=86400)] = 300
    #: Maximum size of the experts that move at once, such as 512Mi, over all ranks. The moves that
    #: reduce the imbalance most come first, and others follow after the next intervals. Ranks send
    #: 2Gi in 18 s over 1 Gbit/s, and wait at most 30 s for an expert.
    max_move_memory: Quantity = "2Gi"


class DecodeParallelism(PrefillParallelism, frozen=True):
    """How the model is split across the devices of one decode pod."""

    #: Pipeline-parallel size: number of stages, each with a part of the layers. A pod has tensor x
    #: pipeline workers. With prefill or with expert it must be 1, because every worker then needs
    #: all layers.
    pipeline: Annotated[int, Meta(ge=1, le=64)] = 1
    #: true: the pods are the ranks of one expert-parallel group, for a mixture-of-experts model.
    #: The group changes its size while it serves, without a failed request. false: every pod is an
    #: independent engine.
    expert: bool = False
    #: Number of additional expert copies in each sparse layer of the group. They balance the load
    #: and replace the experts of a lost rank. They use memory on every rank. Needs expert.
    redundant_experts: Annotated[int, Meta(ge=0, le=4096)] = 0
    rebalance: Rebalance = Rebalance()


class AutoscalingBounds(ApiStruct, kw_only=True, frozen=True):
    """Bounds and delays of autoscaling."""

    #: Minimum number of pods. 0: the group is scaled to zero after idleSeconds without a request.
    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Meta(ge=1, le=256)]  #: Maximum number of pods.
    #: Percentile of the latencies of the last minute that is compared with the targets.
    percentile: Annotated[int, Meta(ge=50, le=99)] = 95
    #: Tolerance in percent of a target. The group grows if a measurement is more than this above
    #: its target. It shrinks only to a size whose predicted latency is this far below the target.
    tolerance_percent: Annotated[int, Meta(ge=0, le=50)] = 10
    #: The group grows only to the smallest size that was recommended within this many seconds.
    scale_up_stabilization_seconds: StabilizationSeconds = 30
    #: The group shrinks only to the largest size that was recommended within this many seconds.
    scale_down_stabilization_seconds: StabilizationSeconds = 300
    #: Seconds without a request after which the group is scaled to zero. Required if minReplicas is
    #: 0, and refused otherwise.
    idle_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None


class PrefillAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """Autoscaling of the prefill group by the time to first token. replicas is the initial size."""

    #: Target for the time from an engine's receipt of a request to the first token.
    ttft_milliseconds: Milliseconds
    #: Percentage of time for which engines may be busy. The group does not shrink to a size at
    #: which they would be busier.
    busy_percent: Percent = 80


class DecodeAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """Autoscaling of the decode group by the inter-token latency. replicas is the initial size."""

    #: Target for the time from one token of a sequence to the next. It controls the number of pods;
    #: engine.targetItlMilliseconds controls the steps of each engine.
    itl_milliseconds: Milliseconds
    #: Target for the time to first token while the service has no prefill pods. Unset: no target.
    ttft_milliseconds: Milliseconds | None = None
    #: Target for the percentage of KV blocks in use. The other blocks let sequences grow.
    kv_usage_percent: Percent = 80
    #: Seconds for which the gateway holds a request while a group scaled to zero starts its first
    #: pod. Then the request gets 503 with Retry-After. Set it longer than a pod takes to load the
    #: model. Refused unless minReplicas is 0. Unset: 300.
    hold_seconds: Annotated[int, Meta(ge=1, le=3600)] | None = None


class AutoscalingStatus(ApiStruct, frozen=True):
    """The last decision of the autoscaler for the group."""

    size: Count  #: Number of pods of the group. It is used instead of the spec's replicas.
    #: Number of pods that the measurements recommend, before stabilization, step limits and bounds.
    recommended: Count
    #: The cause in one word, for programs.
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)]  #: The decision and its measurements.
    last_scale_time: Time | None = None  #: Time of the last change of the size.


class Prefill(ApiStruct, frozen=True):
    """The pods that compute prompts. Unset: decode pods compute the prompts."""

    #: Number of pods, with one data-parallel rank each. 0: decode pods compute the prompts.
    replicas: Replicas = 1
    autoscaling: PrefillAutoscaling | None = None
    parallelism: PrefillParallelism = PrefillParallelism()
    #: Tuning of the prefill engines. The fields that are set here override those of spec.engine.
    #: extraArgs are appended.
    engine: Engine | None = None
    resources: Resources | None = None
    template: Template | None = None


class Decode(ApiStruct, frozen=True):
    """The pods that generate tokens. The scale subresource sets the field replicas."""

    replicas: Replicas = 1  #: Number of pods, with one data-parallel rank each.
    autoscaling: DecodeAutoscaling | None = None
    parallelism: DecodeParallelism = DecodeParallelism()
    #: Tuning of the decode engines. The fields that are set here override those of spec.engine.
    #: extraArgs are appended.
    engine: Engine | None = None
    resources: Resources | None = None
    template: Template | None = None


class RollingUpdate(ApiStruct, frozen=True):
    """How pods of a new revision replace the pods of one group."""

    #: Number of pods beyond replicas that may exist during a rollout. A percentage of replicas,
    #: such as 25%, is rounded up.
    max_surge: IntOrPercent = 1
    #: Number by which the serving pods may fall below replicas during a rollout. A percentage of
    #: replicas is rounded down. If maxSurge is 0, it is at least 1.
    max_unavailable: IntOrPercent = 0
    #: Seconds for which a new pod waits while no node has room for it. Then an old pod drains and
    #: the new pod takes its place. One pod fewer serves until the new one is ready. Set it longer
    #: than the cluster takes to add a node.
    surge_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] = 30


class UpdateStrategy(ApiStruct, frozen=True):
    """How the pods of a group are replaced when their template or configuration changes.

    A group without such a change keeps its pods.
    """

    prefill: RollingUpdate = RollingUpdate()
    decode: RollingUpdate = RollingUpdate()


def surge_and_unavailable(strategy: RollingUpdate, replicas: int) -> tuple[int, int]:
    """Return (maxSurge, maxUnavailable) as numbers of pods.

    Percentages of `replicas` are rounded up for maxSurge and down for maxUnavailable. If both would
    be 0, maxUnavailable is 1, so that pods can be replaced.
    """
    surge = math.ceil(_pods(strategy.max_surge, replicas))
    unavailable = min(math.floor(_pods(strategy.max_unavailable, replicas)), replicas)
    return surge, unavailable if surge or unavailable else 1


def _pods(value: int | str, replicas: int) -> float:
    return value if isinstance(value, int) else int(value.removesuffix("%")) * replicas / 100
