"""Find a hold: a reason why the size of a group must not change now. Pure.

The size stays while measurements are missing or stale, and while the pods differ from the desired
ones. After such a difference, the size stays until all measurements in the window are newer than
the difference (as in Dynamo's planner).

The stabilization windows, step limits and bounds in `policy` can keep the size without a hold.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from baton_operator.autoscale.decision_history import History
from baton_operator.autoscale.windows import Window
from baton_operator.names import MemberRole
from baton_operator.status.reasons import METRICS_MISSING, METRICS_STALE

HoldReason = Literal[
    "OperationRunning", "PodsNotReady", "Settling", "MetricsMissing", "MetricsStale"
]


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state of the prefill or decode group."""

    role: MemberRole
    #: Desired number of engines.
    size: int
    #: Number of existing pods, including draining pods.
    pods: int
    #: Number of engines that serve.
    ready: int
    #: The operation that must end before the size changes, for example a rollout. Empty: none.
    operation: str = ""
    #: Whether this is the decode role of a service without prefill engines, with a TTFT target.
    aggregated: bool = False


class Hold(NamedTuple):
    """A reason why the autoscaler must not change the size of a group now."""

    reason: HoldReason
    why: str  # with the numbers, for the status
    #: Whether the existing pods are the desired ones. If False, the history records this time, and
    #: later decisions use only measurements that begin after it.
    is_settled: bool = True


def find_hold(
    now: float,
    group: RoleState,
    window: Window | None,
    history: History,
    *,
    window_s: float,
    stale_s: float,
) -> Hold | None:
    """Return the reason why the size must not change now; None if it may change.

    Args:
        now, window, history: as in `policy.decide`.
        window_s, stale_s: as in `policy.Behavior`.
    """
    if group.operation:
        return Hold("OperationRunning", f"{group.operation} is under way", is_settled=False)
    if group.ready != group.size or group.pods != group.size:
        why = f"{group.ready} of {group.size} engines are ready, {group.pods} pods exist"
        return Hold("PodsNotReady", why, is_settled=False)
    if window is None:
        return Hold(METRICS_MISSING, "there are no measurements yet")
    if now - window.end > stale_s:
        return Hold(METRICS_STALE, f"the last measurements are {now - window.end:.0f} s old")
    if window.start < history.unsettled_until or window.end - window.start < window_s / 2:
        return Hold("Settling", "there are too few measurements since the pods changed")
    engines = window.roles[group.role].engines
    if engines < group.size:
        return Hold(METRICS_MISSING, f"{engines} of {group.size} engines answered with metrics")
    if window.gateways == 0:
        return Hold(METRICS_MISSING, "no gateway answered with metrics")
    return None
