"""The reasons of conditions that this package decides.

Other reasons come from `reconcile_errors`, `plan.refused_pods`, `autoscale` and replies to
`GET /health` of pods. A component also prints a reason before it exits, in a line `FATAL REASON:
MESSAGE`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: Reasons of the autoscaler by which the condition Scaling is computed. `autoscale.policy.Reason`
#: lists all of its reasons.
ON_TARGET: Final = "OnTarget"  # the size meets all targets
METRICS_MISSING: Final = "MetricsMissing"
METRICS_STALE: Final = "MetricsStale"


class Progress(StrEnum):
    """Condition reasons for a change in progress without a failure. They cause no Event."""

    STARTING = "Starting"
    PROGRESSING = "Progressing"
    DRAINING = "Draining"
    REPLACING = "Replacing"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    SCALED_TO_ZERO = "ScaledToZero"
    ROUTE_PENDING = "RoutePending"
    # Reasons of engines that a client has paused or put to sleep.
    ENGINE_ASLEEP = "EngineAsleep"
    ENGINE_PAUSED = "EnginePaused"
    # Reasons of pods that fetch or load the model.
    FETCHING = "Fetching"
    LOADING = "Loading"
    # Reasons of sizes and topologies.
    FORMING = "Forming"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    COMMITTING = "Committing"
    RECOVERING = "Recovering"
    REBALANCING = "Rebalancing"


class Settled(StrEnum):
    """Condition reasons for a state without change or failure. They cause no Event."""

    ALL_GROUPS_READY = "AllGroupsReady"
    AT_REST = "AtRest"
    AVAILABLE = "Available"
    MINIMUM_PODS_READY = "MinimumPodsReady"
    NOT_OBSERVED = "NotObserved"
    NOT_REQUESTED = "NotRequested"
    PAUSED = "Paused"
    PODS_READY = "PodsReady"
    UP_TO_DATE = "UpToDate"


class Failure(StrEnum):
    """Condition reasons for a failure."""

    CONTAINER_ERROR = "ContainerError"
    CONTAINER_TERMINATED = "ContainerTerminated"
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable"
    CRASH_LOOPING = "CrashLooping"
    IMAGE_PULL = "ImagePull"
    IMAGE_VOLUME_UNSUPPORTED = "ImageVolumeUnsupported"
    INCOMPATIBLE_PEERS = "IncompatiblePeers"
    MODEL_MISSING = "ModelMissing"
    NETWORK_POLICY_OFF = "NetworkPolicyOff"
    NO_CAPACITY = "NoCapacity"
    POD_FAILED = "PodFailed"
    ROLLOUT_STALLED = "RolloutStalled"
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted"
    SCALE_FAILED = "ScaleFailed"


def is_progress(reason: str) -> bool:
    """Return whether `reason`, the reason of a condition, is one of `Progress`."""
    return reason in set(Progress)
