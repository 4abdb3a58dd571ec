"""`spec.prefill`, `spec.decode` and `spec.updateStrategy`."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, Count, Resources, Template, Time

DEFAULT_HOLD_SECONDS = 300

IntOrPercent = (
    Annotated[int, Meta(ge=0, le=256)] | Annotated[str, Meta(pattern=r"^(100|[0-9]{1,2})%$")]
)
Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]
Percent = Annotated[int, Meta(ge=1, le=100)]
Replicas = Annotated[int, Meta(ge=0, le=256)]
StabilizationSeconds = Annotated[int, Meta(ge=0, le=3600)]


class PrefillParallelism(ApiStruct, frozen=True):
    """How one prefill rank is spread over devices."""

    #: Tensor-parallel size: workers of one pod, one device each, over which every layer is spread.
    #: Prefill and decode may differ. The model's KV heads must divide among the workers.
    tensor: Annotated[int, Meta(ge=1, le=64)] = 1


class DecodeParallelism(PrefillParallelism, frozen=True):
    """How decode ranks are spread over devices."""

    #: Pipeline-parallel size: stages over which the layers are spread. A pod has tensor x pipeline
    #: workers. Not with prefill, whose KV blocks only workers with all layers can take, and not
    #: with expert.
    pipeline: Annotated[int, Meta(ge=1, le=64)] = 1
    #: true: the ranks are one expert-parallel group, for a mixture-of-experts model, and editing
    #: replicas is an elastic operation without a lost request. false: every rank is an independent
    #: engine.
    expert: bool = False
    #: With expert: additional copies of experts in each sparse layer of the group, for load balance
    #: and for the death of a rank. They cost memory on every rank.
    redundant_experts: Annotated[int, Meta(ge=0, le=4096)] = 0


class AutoscalingBounds(ApiStruct, kw_only=True, frozen=True):
    """Bounds and delays of autoscaling."""

    #: 0: all pods of the group are removed after idleSeconds without a request.
    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Meta(ge=1, le=256)]  #: The group never has more pods.
    #: Percentile of the latencies of one minute that is compared with the targets.
    percentile: Annotated[int, Meta(ge=50, le=99)] = 95
    #: A latency this far above a target misses it. One this far below meets it with a margin.
    tolerance_percent: Annotated[int, Meta(ge=0, le=50)] = 10
    #: The group grows only to the smallest size that was recommended during this time.
    scale_up_stabilization_seconds: StabilizationSeconds = 30
    #: The group shrinks only to the largest size that was recommended during this time.
    scale_down_stabilization_seconds: StabilizationSeconds = 300
    #: With minReplicas 0: all pods of the group are removed after this long without a request.
    idle_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None


class PrefillAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """The operator sizes the group by the time to the first token. replicas is the initial size."""

    #: Target: from the engine's receipt of a request to its first token.
    ttft_milliseconds: Milliseconds
    #: The group does not shrink so far that its engines would be busier than this.
    busy_percent: Percent = 80


class DecodeAutoscaling(AutoscalingBounds, kw_only=True, frozen=True):
    """The operator sizes the group by the time between tokens. replicas is the initial size."""

    itl_milliseconds: Milliseconds  #: Target: from one token of a sequence to the next.
    #: Target for the first token while there are no prefill pods; unset: it does not count.
    ttft_milliseconds: Milliseconds | None = None
    kv_usage_percent: Percent = 80  #: Target for the KV blocks in use, so that sequences can grow.
    #: With minReplicas 0: the gateway holds a request for this long while the first pod starts, 300
    #: if unset. Then it answers 503 with Retry-After. Set it longer than the model takes to load.
    hold_seconds: Annotated[int, Meta(ge=1, le=3600)] | None = None


class AutoscalingStatus(ApiStruct, frozen=True):
    """The last decision of the autoscaler for the group."""

    size: Count  #: Size of the group. The spec's replicas does not apply.
    #: Size that the measurements recommend, before stabilisation, step limits and bounds.
    recommended: Count
    #: The cause in one word, for programs.
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)]  #: The decision and its figures.
    last_scale_time: Time | None = None  #: When the size changed last.


class Prefill(ApiStruct, frozen=True):
    """The group that runs the prefill stage of requests."""

    #: Data-parallel ranks, one pod each. 0: decode pods prefill for themselves.
    replicas: Replicas = 1
    autoscaling: PrefillAutoscaling | None = None
    parallelism: PrefillParallelism = PrefillParallelism()
    resources: Resources | None = None
    template: Template | None = None


class Decode(ApiStruct, frozen=True):
    """The group that generates tokens. The scale subresource sets its replicas."""

    replicas: Replicas = 1  #: Data-parallel ranks, one pod each.
    autoscaling: DecodeAutoscaling | None = None
    parallelism: DecodeParallelism = DecodeParallelism()
    resources: Resources | None = None
    template: Template | None = None


class RollingUpdate(ApiStruct, frozen=True):
    """How the pods of one group are replaced by those of a new revision."""

    #: Pods beyond replicas that may exist during a rollout: a number, or a share of replicas such
    #: as 25%, rounded up.
    max_surge: IntOrPercent = 1
    #: How many fewer pods than replicas may serve during a rollout: a number, or a share of
    #: replicas, rounded down. If maxSurge is zero too, it is at least one.
    max_unavailable: IntOrPercent = 0
    #: A new pod for which no node has had room for this long takes the place of an old one, which
    #: drains first. One pod fewer serves until the new one is ready. Set it longer where new nodes
    #: are started on demand.
    surge_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] = 30


class UpdateStrategy(ApiStruct, frozen=True):
    """How pods are replaced when their template or configuration changes.

    Other groups keep their pods.
    """

    prefill: RollingUpdate = RollingUpdate()
    decode: RollingUpdate = RollingUpdate()


def surge_and_unavailable(strategy: RollingUpdate, replicas: int) -> tuple[int, int]:
    """Return both as numbers of pods.

    They are never both zero, because then no pod could be replaced.
    """
    surge = math.ceil(_pods(strategy.max_surge, replicas))
    unavailable = min(math.floor(_pods(strategy.max_unavailable, replicas)), replicas)
    return surge, unavailable if surge or unavailable else 1


def _pods(value: int | str, replicas: int) -> float:
    return value if isinstance(value, int) else int(value.removesuffix("%")) * replicas / 100
