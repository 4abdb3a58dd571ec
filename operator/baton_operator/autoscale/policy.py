"""`decide`: the size of one role, from what was measured and what was decided before. Pure: no clock, no client.

In this order, as a HorizontalPodAutoscaler does (kubernetes.io, "Horizontal Pod Autoscaling", algorithm details and configurable
scaling behavior), with what engines that take minutes to load need besides:

1. A size outside its bounds is brought inside, whatever is measured.
2. The size stays while measurements are missing or stale, or pods are not what they should be, or were not while it was measured
   (Dynamo's planner: no adjustment while workers are adjusted).
3. From zero as soon as a gateway holds a request; to zero after nobody wanted anything for `idle_s`, if the minimum is 0.
4. The recommendation is the largest wish of `signals`.
5. Stabilised: up to the least recommendation of the last `up_window_s`, down to the largest of the last `down_window_s`, and not
   down before there were recommendations for so long.
6. At most `up_step` or doubled, down by `down_fraction` but at least one, within `step_s`; inside the bounds.
7. A load per engine at which a target was missed after a step down is remembered: for `breach_memory_s` the role does not shrink
   back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton_operator.autoscale.decision_history import Breach, History
from baton_operator.autoscale.signals import (
    Signal,
    SignalReason,
    Targets,
    aggregated_signals,
    breach_signal,
    decode_signals,
    load_per_engine,
    prefill_signals,
)
from baton_operator.autoscale.windows import RoleWindow, Window
from baton_operator.names import MemberRole

Reason = (
    SignalReason
    | Literal[
        "OutOfBounds",
        "MetricsMissing",
        "MetricsStale",
        "PodsNotReady",
        "OperationRunning",
        "Settling",
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
    """0 <= min <= max, 1 <= max."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"

    def nearest(self, size: int) -> int:
        """The size within that is nearest to `size`."""
        return min(max(size, self.min), self.max)


class Behavior(msgspec.Struct, frozen=True, kw_only=True):
    """How fast and how surely. Times in seconds."""

    window_s: float = 60.0
    """Of the measurements."""
    stale_s: float = 60.0
    """Older measurements decide nothing."""
    tolerance: float = 0.1
    """A target is missed above (1 + tolerance) of it, met with a margin below (1 - tolerance)."""
    up_window_s: float = 30.0
    down_window_s: float = 300.0
    step_s: float = 60.0
    up_step: int = 4
    """Engines that may be added within `step_s`; doubling is always allowed."""
    down_fraction: float = 0.25
    """Of the engines that may leave within `step_s`; one always may."""
    idle_s: float = 600.0
    breach_memory_s: float = 3600.0

    @property
    def keep_s(self) -> float:
        """What the history keeps."""
        return max(self.up_window_s, self.down_window_s, self.step_s)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One role as it is."""

    role: MemberRole
    size: int
    """That it should have now."""
    pods: int
    """That exist, those that drain included."""
    ready: int
    operation: str = ""
    """What runs and must end first, for example a change of topology or a rollout."""
    aggregated: bool = False
    """Of decode: there are no prefill engines."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    role: MemberRole
    size: int
    reason: Reason
    explanation: str
    """One sentence with the numbers, for status and events."""
    recommended: int
    """What the measurements alone ask for; of a hold, the size as it is."""
    history: History
    """For the next decision."""


def decide(
    now: float,
    group: Group,
    bounds: Bounds,
    targets: Targets,
    window: Window | None,
    history: History,
    behavior: Behavior,
) -> Decision:
    """The size that `group` should have.

    Args:
        now: seconds, of the clock of `window` and `history`.
        window: the last `behavior.window_s`. None: nothing was measured yet.
        history: of this role.
    """
    n = group.size
    inside = bounds.nearest(n)
    if inside != n:
        words = f"{n} is outside of {bounds}"
        return _decision(now, group, history, behavior, inside, "OutOfBounds", words)
    if n == 0:
        return _from_zero(now, group, window, history, behavior)
    idle = _idle_since(now, window, history, behavior)
    if (
        bounds.min == 0
        and idle is not None
        and now - idle >= behavior.idle_s
        and not group.operation
    ):
        words = f"no requests for {behavior.idle_s:g} s"
        return _decision(now, group, history, behavior, 0, "Idle", words, idle=idle)
    if hold := _hold(now, group, window, history, behavior):
        reason, words, settled = hold
        # While the engines of a step down leave, what asked for it still stands; what else keeps the size asks for it.
        leaving = (
            reason in ("OperationRunning", "PodsNotReady", "Settling")
            and history.changed(now, behavior.down_window_s) < 0
        )
        stands = history.last_recommended(now) if leaving else None
        return _decision(
            now,
            group,
            history,
            behavior,
            n,
            reason,
            words,
            recommended=stands,
            idle=idle,
            settled=settled,
        )
    assert window is not None, "without one there is a hold"
    measured = window.roles[group.role]
    signals = _signals(now, group, window, measured, targets, history, behavior)
    decisive = max(signals, key=lambda signal: signal.size)
    size, reason, words = _limited(now, n, bounds, decisive, signals, history, behavior)
    breach = None
    # Only what shows that a step down went too far: after a step up latencies tell of the queue that is being drained.
    if decisive.size > n and decisive.reason in _MISSED and history.last_delta < 0:
        breach = Breach(now, load_per_engine(n, group.role == "prefill", measured))
    return _decision(
        now,
        group,
        history,
        behavior,
        size,
        reason,
        words,
        recommended=decisive.size,
        breach=breach,
        idle=idle,
    )


def _from_zero(
    now: float, group: Group, window: Window | None, history: History, behavior: Behavior
) -> Decision:
    if window is None or now - window.end > behavior.stale_s or window.gateways == 0:
        return _decision(
            now,
            group,
            history,
            behavior,
            0,
            "MetricsMissing",
            "no gateway tells whether requests wait",
        )
    # Decode engines are what requests are held for; without prefill engines they are only slower.
    waiting = window.held if group.role == "decode" else window.in_flight
    missed = window.answered_at is not None and window.answered_at > history.changed_at
    if waiting > 0 or missed:
        words = (
            f"requests that wait at the gateways: {waiting:.0f}"
            if waiting > 0
            else "requests came and were not held"
        )
        return _decision(now, group, history, behavior, 1, "RequestsHeld", words)
    return _decision(now, group, history, behavior, 0, "Idle", "no requests", idle=now)


def _hold(
    now: float, group: Group, window: Window | None, history: History, behavior: Behavior
) -> tuple[Reason, str, bool] | None:
    """Why nothing can be decided now, and whether the pods are what they should be."""
    if group.operation:
        return "OperationRunning", f"{group.operation} is under way", False
    if group.ready != group.size or group.pods != group.size:
        return (
            "PodsNotReady",
            f"{group.ready} of {group.size} engines are ready, {group.pods} pods exist",
            False,
        )
    if window is None:
        return "MetricsMissing", "nothing was measured yet", True
    if now - window.end > behavior.stale_s:
        return "MetricsStale", f"the last measurements are {now - window.end:.0f} s old", True
    engines = window.roles[group.role].engines
    if window.start < history.unsettled_until or window.end - window.start < behavior.window_s / 2:
        return "Settling", "measurements of these engines alone are too few yet", True
    if engines < group.size:
        return "MetricsMissing", f"{engines} of {group.size} engines answered with metrics", True
    if window.gateways == 0:
        return "MetricsMissing", "no gateway answered with metrics", True
    return None


def _idle_since(
    now: float, window: Window | None, history: History, behavior: Behavior
) -> float | None:
    """Since when the gateways are known to have nothing to do. None: they have, or do not say."""
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


def _signals(
    now: float,
    group: Group,
    window: Window,
    measured: RoleWindow,
    targets: Targets,
    history: History,
    behavior: Behavior,
) -> list[Signal]:
    n, prefill = group.size, group.role == "prefill"
    wishes = (
        prefill_signals if prefill else aggregated_signals if group.aggregated else decode_signals
    )
    signals = wishes(n, measured, targets, behavior.tolerance, window.quantile)
    if history.breach is not None and now - history.breach.at < behavior.breach_memory_s:
        signals.append(breach_signal(n, prefill, measured, history.breach, behavior.tolerance))
    return signals


def _limited(
    now: float,
    n: int,
    bounds: Bounds,
    decisive: Signal,
    signals: Sequence[Signal],
    history: History,
    behavior: Behavior,
) -> tuple[int, Reason, str]:
    """From the recommendation to the size: stabilised, in steps, inside the bounds."""
    wants = max(decisive.size, bounds.min)
    if wants > n:
        numbers = decisive.text
        size = min([wants, *history.recommended(now, behavior.up_window_s)])
        if size <= n:
            return (
                n,
                "Stabilizing",
                f"{numbers}, which asks for {wants}, but not for {behavior.up_window_s:g} s yet",
            )
        if n == bounds.max:
            return n, "AtMaximum", f"{numbers}, which asks for {wants}, but the maximum is {n}"
        before = n - max(0, history.changed(now, behavior.step_s))
        size = min(size, max(n, 2 * before, before + behavior.up_step), bounds.max)
        if size == n:
            return (
                n,
                "Stabilizing",
                f"{numbers}, which asks for {wants}, but no more within {behavior.step_s:g} s",
            )
        return (
            size,
            decisive.reason,
            numbers if size == wants else f"{numbers}, which asks for {wants}",
        )
    everything = "; ".join(signal.text for signal in signals)
    if wants < n:
        size = max([wants, *history.recommended(now, behavior.down_window_s)])
        if size >= n or not history.covers(now, behavior.down_window_s):
            return (
                n,
                "Stabilizing",
                f"{wants} would do, but not for {behavior.down_window_s:g} s yet: {everything}",
            )
        before = n - min(0, history.changed(now, behavior.step_s))
        size = max(size, min(n, before - max(1, int(before * behavior.down_fraction))))
        if size == n:
            return (
                n,
                "Stabilizing",
                f"{wants} would do, but no fewer within {behavior.step_s:g} s: {everything}",
            )
        return size, "BelowTargets", everything
    unreachable = next((signal for signal in signals if signal.reason == "TargetUnreachable"), None)
    if unreachable is not None:
        return n, "TargetUnreachable", unreachable.text
    return n, "OnTarget", everything


def _decision(
    now: float,
    group: Group,
    history: History,
    behavior: Behavior,
    size: int,
    reason: Reason,
    words: str,
    *,
    recommended: int | None = None,
    breach: Breach | None = None,
    idle: float | None = None,
    settled: bool = True,
) -> Decision:
    recommended = size if recommended is None else recommended
    what = (
        f"{group.role} stays at {size}"
        if size == group.size
        else f"{group.role} {group.size} -> {size}"
    )
    return Decision(
        role=group.role,
        size=size,
        reason=reason,
        explanation=f"{what}: {words}.",
        recommended=recommended,
        history=history.noting(
            now,
            recommended,
            keep_s=behavior.keep_s,
            change=size - group.size,
            breach=breach,
            idle=idle,
            settled=settled,
        ),
    )
