"""What each measurement wishes for the size of a role, in numbers and words. Pure; the largest wish decides (as among the metrics
of a HorizontalPodAutoscaler).

A wish above the present size n says that a target is missed; one below it that so many engines would meet the target with a
margin. Latency grows with load, but not in proportion: so a missed target raises the size by the ratio (HPA's ceil(n ratio)), but a
latency below it says nothing about fewer engines by itself. What it would become with m of them is forecast from measured load.
Every wish is at least 1, and the largest never falls when TTFT, ITL, the time in the queue or KV usage grows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, isfinite
from typing import Literal

import msgspec

from baton_operator.autoscale.decision_history import Breach
from baton_operator.autoscale.queueing import wait_quantile_s
from baton_operator.autoscale.windows import RoleWindow

MIN_SAMPLES = 20
"""Observations below which a quantile is a story about single requests: it may keep a size, but not raise it."""
QUEUE_SHARE = 0.1
"""Of the target for TTFT: requests that wait less than this for an engine would not gain from more of them."""
WAITING_PER_ENGINE = 1.0
"""From here on there is a queue; less is a request that came during a step."""
WAITING_AT_REST = 0.1
LARGEST = 10_000
"""More engines than any bound allows."""
DRAIN_S = 60.0
"""In which a queue of prompts shall be gone, once as many engines as it asks for are there."""

SignalReason = Literal[
    "TTFTAboveTarget",
    "ITLAboveTarget",
    "KVUsageHigh",
    "RequestsQueue",
    "EnginesBusy",
    "RecentBreach",
    "TargetUnreachable",
]


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What the sizes are to achieve."""

    ttft_s: float
    """Seconds to the first token, at the window's quantile."""
    itl_s: float
    """Seconds per token after it."""
    kv_usage: float = 0.8
    """Of a decode engine's KV blocks; what is left takes growing sequences without preemptions."""
    busy: float = 0.8
    """Fraction of time that a prefill engine computes prompts, above which the role does not shrink."""


class Signal(msgspec.Struct, frozen=True):
    """One wish."""

    reason: SignalReason
    size: int
    text: str
    """The numbers behind it, part of a sentence."""


def prefill_signals(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Signal]:
    """Wishes for `n` prefill engines.

    - TTFT above target: ceil(n TTFT / target), but no more than the load needs, if requests wait for engines: more engines shorten
      only the wait.
    - TTFT below: the fewest m with TTFT + wait(m) - wait(n) <= (1 - tolerance) target, the waits modelled (`queueing`).
    - Queue: who arrives now will wait for waiting / throughput (Little), known long before they have their token. If that misses
      the target, what the load needs: seconds of an engine per request, times arrivals per second and the queue's share of
      DRAIN_S, at the target for busy. Arrivals are what was computed plus the growth of the queue. While a queue drains, the TTFT
      of those who left it is high; it does not ask for more then.
    - Busy: at least ceil(n busy / target), as Dynamo sizes by throughput per engine. It never raises the size: an engine that is
      always busy and nobody waits for is what one wants.
    """
    offered = n * role.busy

    def ttft_with(m: int) -> float:
        here = wait_quantile_s(n, min(offered, 0.999 * n), role.prefill_s, quantile)
        return (role.ttft_s or 0.0) - here + wait_quantile_s(m, offered, role.prefill_s, quantile)

    busy = Signal(
        "EnginesBusy", min(n, _ceil(offered / targets.busy)), f"engines are {role.busy:.0%} busy"
    )
    return [
        _prefill_latency(n, role, targets, tolerance, quantile, ttft_with),
        _prefill_queue(n, role, targets, tolerance),
        busy,
    ]


def _prefill_latency(
    n: int,
    role: RoleWindow,
    targets: Targets,
    tolerance: float,
    quantile: float,
    forecast: Callable[[int], float],
) -> Signal:
    if role.ttft_s is None:
        return Signal("TTFTAboveTarget", 1, "no first tokens")
    limit_s = (1 + tolerance) * targets.ttft_s
    text = _latency_text("TTFT", quantile, role.ttft_s, targets.ttft_s)
    if role.ttft_s <= limit_s or role.first_tokens < MIN_SAMPLES:
        return Signal(
            "TTFTAboveTarget",
            _fewest(n, lambda m: forecast(m) <= (1 - tolerance) * targets.ttft_s),
            text,
        )
    if role.queue_s < QUEUE_SHARE * targets.ttft_s and role.waiting < WAITING_PER_ENGINE:
        unreachable = f"{text}, but requests wait only {_time(role.queue_s)} for an engine: more would not help"
        return Signal("TargetUnreachable", n, unreachable)
    if _ttft_of_next_s(n, role) > limit_s:
        return Signal("TTFTAboveTarget", n, text)
    return Signal(
        "TTFTAboveTarget",
        max(n + 1, min(_needed(n, role, targets), _ceil(n * role.ttft_s / targets.ttft_s))),
        text,
    )


def _prefill_queue(n: int, role: RoleWindow, targets: Targets, tolerance: float) -> Signal:
    text = f"{role.waiting:.1f} prompts wait per engine"
    next_s = _ttft_of_next_s(n, role)
    if next_s > (1 + tolerance) * targets.ttft_s:
        after = (
            f"after {_time(next_s)}"
            if isfinite(next_s)
            else "nobody knows when, for none was computed"
        )
        return Signal(
            "RequestsQueue",
            max(n, _needed(n, role, targets)),
            f"{text}, the next has its first token {after}",
        )
    return Signal("RequestsQueue", 1 if role.waiting <= WAITING_AT_REST else n, text)


def _ttft_of_next_s(n: int, role: RoleWindow) -> float:
    """TTFT that a request arriving now can expect, seconds, by what waits before it; 0 without a queue."""
    if role.waiting < WAITING_PER_ENGINE:
        return 0.0
    return role.prefill_s + n * role.waiting / role.requests_per_s if role.requests_per_s else inf


def _needed(n: int, role: RoleWindow, targets: Targets) -> int:
    """Prefill engines that keep up with the arrivals and drain the queue in DRAIN_S."""
    if role.requests_per_s == 0:
        return 2 * n
    engine_s = n * role.busy / role.requests_per_s
    arrivals = max(0.0, role.requests_per_s + role.waiting_growth_per_s)
    return _ceil(engine_s * (arrivals + n * role.waiting / DRAIN_S) / targets.busy)


def decode_signals(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Signal]:
    """Wishes for `n` decode engines whose prompts come from prefill engines.

    - ITL above target: ceil(n ITL / target), if engines run more than one sequence. The time of a step is a + b sequences.
    - ITL below: the fewest m with ITL max(1, R / m) / max(1, R / n) <= (1 - tolerance) target for R running sequences; the
      factor is an upper bound of how a + b sequences grows with the sequences.
    - KV usage above target: HPA's ceil(n usage / target). Below: the fewest m with usage (n / m) times the factor <= target, for
      sequences that share an engine with more others also stay longer.
    - Queue: as many engines as would run all: ceil(n (running + waiting) / running).
    """
    return [
        _decode_latency(
            "ITL", role.itl_s, role.tokens, targets.itl_s, n, role, tolerance, quantile
        ),
        _kv_usage(n, role, targets, tolerance),
        _decode_queue(n, role),
    ]


def aggregated_signals(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Signal]:
    """Wishes for `n` decode engines that prefill for themselves: TTFT counts like ITL, for prompts and tokens share steps."""
    ttft = _decode_latency(
        "TTFT", role.ttft_s, role.first_tokens, targets.ttft_s, n, role, tolerance, quantile
    )
    return [ttft, *decode_signals(n, role, targets, tolerance, quantile)]


def _decode_latency(
    name: Literal["TTFT", "ITL"],
    latency_s: float | None,
    samples: float,
    target_s: float,
    n: int,
    role: RoleWindow,
    tolerance: float,
    quantile: float,
) -> Signal:
    reason: SignalReason = "TTFTAboveTarget" if name == "TTFT" else "ITLAboveTarget"
    if latency_s is None:
        return Signal(reason, 1, "no tokens")
    running = n * role.running
    text = f"{_latency_text(name, quantile, latency_s, target_s)} with {role.running:.1f} sequences per engine"
    if latency_s > (1 + tolerance) * target_s and samples >= MIN_SAMPLES:
        if role.running > 1 or role.waiting >= WAITING_PER_ENGINE:
            return Signal(reason, _ceil(n * latency_s / target_s), text)
        return Signal("TargetUnreachable", n, f"{text}: more engines would not help")

    return Signal(
        reason,
        _fewest(n, lambda m: latency_s * _growth(n, m, running) <= (1 - tolerance) * target_s),
        text,
    )


def _growth(n: int, m: int, running: float) -> float:
    """By how much the time of a step grows at most when the sequences of `n` engines run on `m`."""
    return max(1.0, running / m) / max(1.0, running / n)


def _kv_usage(n: int, role: RoleWindow, targets: Targets, tolerance: float) -> Signal:
    text = f"KV is {role.kv_usage:.0%} in use for a target of {targets.kv_usage:.0%}"
    if role.kv_usage > (1 + tolerance) * targets.kv_usage:
        return Signal("KVUsageHigh", _ceil(n * role.kv_usage / targets.kv_usage), text)

    def usage_with(m: int) -> float:
        return role.kv_usage * n / m * _growth(n, m, n * role.running)

    return Signal("KVUsageHigh", _fewest(n, lambda m: usage_with(m) <= targets.kv_usage), text)


def _decode_queue(n: int, role: RoleWindow) -> Signal:
    text = f"{role.waiting:.1f} requests wait per engine"
    if role.waiting >= WAITING_PER_ENGINE:
        # One that runs nothing yet and has a queue is as good as one sequence per engine.
        running = max(1.0, role.running)
        return Signal("RequestsQueue", _ceil(n * (running + role.waiting) / running), text)
    return Signal("RequestsQueue", 1 if role.waiting <= WAITING_AT_REST else n, text)


def load_per_engine(n: int, prefill: bool, role: RoleWindow) -> float:
    """What an engine carries: the fraction of time it is busy in prefill, tokens per second in decode. Neither grows without
    bounds, or when fewer engines take longer for the same."""
    return role.busy if prefill else role.tokens_per_s / n


def breach_signal(
    n: int, prefill: bool, role: RoleWindow, breach: Breach, tolerance: float
) -> Signal:
    """Not again to the load per engine at which a target was missed: the fewest m with load / m <= (1 - tolerance) of it."""
    limit = (1 - tolerance) * breach.load_per_engine
    size = n if limit <= 0 else min(n, _ceil(n * load_per_engine(n, prefill, role) / limit))
    load = (
        f"{breach.load_per_engine:.0%} busy"
        if prefill
        else f"{breach.load_per_engine:.0f} tokens/s per engine"
    )
    return Signal("RecentBreach", size, f"a target was missed at {load} not long ago")


def _ceil(size: float) -> int:
    """1 to LARGEST; what exceeds a whole number by rounding only is that number."""
    return max(1, ceil(min(size, LARGEST) - 1e-9))


def _fewest(n: int, meets: Callable[[int], bool]) -> int:
    """The smallest size up to `n` that meets, which is true from some size on; `n` if none does."""
    return next((m for m in range(1, n) if meets(m)), n)


def _latency_text(name: str, quantile: float, latency_s: float, target_s: float) -> str:
    return f"{name} p{quantile * 100:g} is {_time(latency_s)} for a target of {_time(target_s)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
