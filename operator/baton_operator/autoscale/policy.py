"""Decide the size of the prefill or decode group, from measurements and earlier decisions. Pure.

The rules are those of a HorizontalPodAutoscaler (kubernetes.io, "Horizontal Pod Autoscaling",
algorithm details and configurable scaling behavior). Some rules are added, because engines take
minutes to load. The rules apply in this order:

1. A size outside the bounds is replaced by the nearest size inside the bounds, even without
   measurements.
2. A group without engines gets one engine as soon as a gateway holds a request.
3. If the minimum is 0, a group without requests for `idle_s` is scaled to zero.
4. The size stays while `holds.find_hold` returns a reason, for example missing measurements.
5. The largest size in `recommendations` is the recommendation.
6. The size grows to the smallest recommendation of the last `up_window_s`. The size shrinks to the
   largest recommendation of the last `down_window_s`, if recommendations cover all of that time.
7. Within `step_s` the size at most doubles or grows by `up_step`, whichever is more. It shrinks by
   at most `down_fraction` or one engine, whichever is more. The size stays inside the bounds.
8. If a target is missed after the size shrank, the group does not return to the same load per
   engine for `breach_memory_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from baton_operator.autoscale.decision_history import Breach, History
from baton_operator.autoscale.holds import HoldReason, RoleState, find_hold
from baton_operator.autoscale.recommendations import (
    Recommendation,
    SizeReason,
    Targets,
    load_per_engine,
    recommend_after_breach,
    recommend_aggregated,
    recommend_decode,
    recommend_prefill,
)
from baton_operator.autoscale.windows import RoleWindow, Window
from baton_operator.status.reasons import METRICS_MISSING, ON_TARGET

Reason = (
    SizeReason
    | HoldReason
    | Literal[
        "OutOfBounds",
        "RequestsHeld",
        "Idle",
        "Stabilizing",
        "OnTarget",
        "BelowTargets",
        "AtMaximum",
    ]
)
_MISSED = ("TTFTAboveTarget", "ITLAboveTarget", "KVUsageHigh", "RequestsQueue")


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a group's size, with 0 <= min <= max and 1 <= max."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"

    def nearest(self, size: int) -> int:
        """Return `size`, limited to the bounds."""
        return min(max(size, self.min), self.max)


class Behavior(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a size may change, and for how long measurements count. Times are in seconds.

    The rules at the top of this module explain the fields.
    """

    #: Length of the measurement window.
    window_s: float = 60.0
    #: Maximum age of the last measurement.
    stale_s: float = 60.0
    #: A target is missed above (1 + tolerance) * target. A group shrinks only to a size for which
    #: the forecast latency is at most (1 - tolerance) * target.
    tolerance: float = 0.1
    up_window_s: float = 30.0
    down_window_s: float = 300.0
    step_s: float = 60.0
    #: Engines that may be added within `step_s`. Doubling is always allowed.
    up_step: int = 4
    #: Fraction of the engines that may be removed within `step_s`. Removing one engine is
    #: always allowed.
    down_fraction: float = 0.25
    idle_s: float = 600.0
    breach_memory_s: float = 3600.0

    @property
    def keep_s(self) -> float:
        """Seconds for which the history keeps entries."""
        return max(self.up_window_s, self.down_window_s, self.step_s)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decided size of the prefill or decode group, and why."""

    size: int
    reason: Reason
    #: One sentence with the numbers, for status and events.
    explanation: str
    #: Size that the measurements recommend. Without a recommendation: the decided size.
    recommended: int
    #: Input of the next decision.
    history: History


class _Choice(NamedTuple):
    """The size that the rules choose, the reason, and what the history records about it."""

    size: int
    reason: Reason
    why: str
    recommended: int | None = None  # None: `size`
    breach: Breach | None = None
    idle_since: float | None = None
    is_settled: bool = True  # the pods are the desired ones


def decide(
    now: float,
    group: RoleState,
    bounds: Bounds,
    targets: Targets,
    window: Window | None,
    history: History,
    behavior: Behavior,
) -> Decision:
    """Decide the size that the group should have.

    Args:
        now: time in seconds, from the same clock as the times in `window` and `history`.
        window: measurements of the last `behavior.window_s`. None: there are none yet.
        history: earlier decisions for this group.
    """
    choice = _choose(now, group, bounds, targets, window, history, behavior)
    size = choice.size
    what = f"stays at {size}" if size == group.size else f"{group.size} -> {size}"
    recommended = size if choice.recommended is None else choice.recommended
    return Decision(
        size=size,
        reason=choice.reason,
        explanation=f"{group.role} {what}: {choice.why}.",
        recommended=recommended,
        history=history.with_decision(
            now,
            recommended,
            keep_s=behavior.keep_s,
            change=size - group.size,
            breach=choice.breach,
            idle=choice.idle_since,
            settled=choice.is_settled,
        ),
    )


def _choose(
    now: float,
    group: RoleState,
    bounds: Bounds,
    targets: Targets,
    window: Window | None,
    history: History,
    behavior: Behavior,
) -> _Choice:
    """Apply the rules in the docstring of this module. The arguments are those of `decide`."""
    n = group.size
    inside = bounds.nearest(n)
    if inside != n:
        return _Choice(inside, "OutOfBounds", f"{n} is not within {bounds}")
    if n == 0:
        return _choose_from_zero(now, group, window, history, behavior)
    idle = _idle_since(now, window, history, behavior)
    is_idle = idle is not None and now - idle >= behavior.idle_s
    if bounds.min == 0 and is_idle and not group.operation:
        return _Choice(0, "Idle", f"no requests for {behavior.idle_s:g} s", idle_since=idle)
    if hold := find_hold(
        now, group, window, history, window_s=behavior.window_s, stale_s=behavior.stale_s
    ):
        # The recommendation of a step down still counts while engines leave. In every other case
        # the present size is recommended.
        is_shrinking = (
            hold.reason in ("OperationRunning", "PodsNotReady", "Settling")
            and history.changed(now, behavior.down_window_s) < 0
        )
        recommended = history.last_recommended(now) if is_shrinking else None
        return _Choice(
            n, hold.reason, hold.why, recommended, idle_since=idle, is_settled=hold.is_settled
        )
    assert window is not None, "find_hold returns a hold while there are no measurements"
    measured = window.roles[group.role]
    recommendations = _recommend(now, group, window, measured, targets, history, behavior)
    decisive = max(recommendations, key=lambda each: each.size)
    size, reason, why = _apply_limits(now, n, bounds, decisive, recommendations, history, behavior)
    breach = None
    # A breach is recorded only after a step down. After a step up, latencies are high while the
    # queue drains.
    if decisive.size > n and decisive.reason in _MISSED and history.last_delta < 0:
        breach = Breach(now, load_per_engine(n, group.role == "prefill", measured))
    return _Choice(size, reason, why, decisive.size, breach, idle_since=idle)


def _choose_from_zero(
    now: float, group: RoleState, window: Window | None, history: History, behavior: Behavior
) -> _Choice:
    if window is None or now - window.end > behavior.stale_s or window.gateways == 0:
        return _Choice(0, METRICS_MISSING, "no gateway reports whether requests wait")
    # The gateway holds requests only while no decode engine serves. Without prefill engines, decode
    # engines compute the prompts, so any request in progress starts a prefill engine.
    waiting = window.held if group.role == "decode" else window.in_flight
    if waiting > 0:
        return _Choice(1, "RequestsHeld", f"requests waiting at the gateways: {waiting:.0f}")
    if window.answered_at is not None and window.answered_at > history.changed_at:
        return _Choice(1, "RequestsHeld", "requests arrived and were not held")
    return _Choice(0, "Idle", "no requests", idle_since=now)


def _idle_since(
    now: float, window: Window | None, history: History, behavior: Behavior
) -> float | None:
    """Return the time since which no gateway has had a request in progress.

    None: a gateway has a request in progress, or there are no recent measurements of gateways.
    """
    if (
        window is None
        or now - window.end > behavior.stale_s
        or window.gateways == 0
        or window.in_flight > 0
    ):
        return None
    known = history.idle_since if history.knows(now) else None
    since = window.start if known is None else known
    return since if window.active_at is None else max(since, window.active_at)


def _recommend(
    now: float,
    group: RoleState,
    window: Window,
    measured: RoleWindow,
    targets: Targets,
    history: History,
    behavior: Behavior,
) -> list[Recommendation]:
    n, prefill = group.size, group.role == "prefill"
    recommend = (
        recommend_prefill
        if prefill
        else recommend_aggregated
        if group.aggregated
        else recommend_decode
    )
    recommendations = recommend(n, measured, targets, behavior.tolerance, window.quantile)
    if history.breach is not None and now - history.breach.at < behavior.breach_memory_s:
        recommendations.append(
            recommend_after_breach(n, prefill, measured, history.breach, behavior.tolerance)
        )
    return recommendations


def _apply_limits(
    now: float,
    n: int,
    bounds: Bounds,
    decisive: Recommendation,
    recommendations: Sequence[Recommendation],
    history: History,
    behavior: Behavior,
) -> tuple[int, Reason, str]:
    """Limit the change from size `n` to the largest recommendation, `decisive`.

    The limits are rules 6 and 7 in the docstring of this module.

    Returns:
        (size, reason, text). The text explains the size, with the numbers, for the status.
    """
    recommended = max(decisive.size, bounds.min)
    if recommended > n:
        return _limit_growth(now, n, bounds, recommended, decisive, history, behavior)
    text = "; ".join(each.text for each in recommendations)
    if recommended < n:
        return _limit_shrinking(now, n, recommended, text, history, behavior)
    unreachable = next(
        (each for each in recommendations if each.reason == "TargetUnreachable"), None
    )
    if unreachable is not None:
        return n, "TargetUnreachable", unreachable.text
    return n, ON_TARGET, text


def _limit_growth(
    now: float,
    n: int,
    bounds: Bounds,
    recommended: int,
    decisive: Recommendation,
    history: History,
    behavior: Behavior,
) -> tuple[int, Reason, str]:
    text = f"{decisive.text}, which calls for {recommended}"
    size = min([recommended, *history.recommended(now, behavior.up_window_s)])
    if size <= n:
        return n, "Stabilizing", f"{text}, but not for {behavior.up_window_s:g} s yet"
    if n == bounds.max:
        return n, "AtMaximum", f"{text}, but the maximum is {n}"
    before = n - max(0, history.changed(now, behavior.step_s))
    size = min(size, max(n, 2 * before, before + behavior.up_step), bounds.max)
    if size == n:
        why = f"the group has already grown as much as it may within {behavior.step_s:g} s"
        return n, "Stabilizing", f"{text}, but {why}"
    return size, decisive.reason, decisive.text if size == recommended else text


def _limit_shrinking(
    now: float, n: int, recommended: int, text: str, history: History, behavior: Behavior
) -> tuple[int, Reason, str]:
    size = max([recommended, *history.recommended(now, behavior.down_window_s)])
    if size >= n or not history.covers(now, behavior.down_window_s):
        why = f"{recommended} would be enough, but not for {behavior.down_window_s:g} s yet"
        return n, "Stabilizing", f"{why}: {text}"
    before = n - min(0, history.changed(now, behavior.step_s))
    size = max(size, min(n, before - max(1, int(before * behavior.down_fraction))))
    if size == n:
        limit = f"the group has already shrunk as much as it may within {behavior.step_s:g} s"
        why = f"{recommended} would be enough, but {limit}"
        return n, "Stabilizing", f"{why}: {text}"
    return size, "BelowTargets", text
