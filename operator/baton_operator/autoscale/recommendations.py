"""Compute the size that each measurement recommends for the prefill or decode group. Pure.

`policy` uses the largest of these sizes, as a HorizontalPodAutoscaler (HPA) does with its metrics.
It uses none of them while `holds` finds a reason to keep the size.

Let n be the present size. A recommendation above n means that a target is missed. As in an HPA, the
recommendation is then ceil(n * value / target). A recommendation of m < n means that m engines
would meet the target with a margin. Latency is not proportional to load, so the latency with m
engines is forecast from the measured load.

Every recommendation is at least 1. The largest recommendation never falls when TTFT, ITL, queue
time or KV usage grows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, isfinite
from typing import Literal

import msgspec

from baton_operator.autoscale.decision_history import Breach
from baton_operator.autoscale.queueing import wait_quantile_s
from baton_operator.autoscale.windows import RoleWindow

#: A quantile raises the size only if it has at least this many observations.
MIN_SAMPLES = 20
#: Fraction of the TTFT target. More engines do not help requests that wait for less than this.
QUEUE_SHARE = 0.1
#: Number of waiting requests per engine that counts as a queue. Fewer requests may have arrived
#: during the current step, and start with the next step.
WAITING_PER_ENGINE = 1.0
#: A queue of at most this many requests per engine does not prevent a smaller size.
WAITING_AT_REST = 0.1
#: Largest recommended size. It exceeds every bound that the spec allows.
LARGEST = 10_000
#: Seconds in which the recommended engines drain a queue of prompts.
DRAIN_S = 60.0

SizeReason = Literal[
    "TTFTAboveTarget",
    "ITLAboveTarget",
    "KVUsageHigh",
    "RequestsQueue",
    "EnginesBusy",
    "RecentBreach",
    "TargetUnreachable",
]


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The targets for the latency and the load of the prefill or decode group."""

    #: Seconds to the first token, at the quantile of the window.
    ttft_s: float
    #: Seconds between tokens, at the quantile of the window.
    itl_s: float
    #: Fraction of KV blocks in use. The free blocks let sequences grow without preemptions.
    kv_usage: float = 0.8
    #: Fraction of time in which prefill engines compute. The group does not shrink to a size at
    #: which they would exceed it.
    busy: float = 0.8


class Recommendation(msgspec.Struct, frozen=True):
    """The size that one measurement recommends."""

    reason: SizeReason
    size: int
    #: The figures, as part of a sentence.
    text: str


def recommend_prefill(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Recommendation]:
    """Return the recommendations for `n` prefill engines.

    Let N be the number of engines that keep up with the arrivals and drain the queue in DRAIN_S
    seconds. Each of the N engines then computes for the fraction `targets.busy` of the time. The
    rate of arrivals is the rate of computed requests plus the growth of the queue.

    - TTFT above target: ceil(n * TTFT / target), but at most N and at least n + 1. The result is n
      if requests barely wait for an engine, because more engines shorten only the wait. It is also
      n while the rule "Queue" recommends N.
    - TTFT below target: the smallest m with TTFT - wait(n) + wait(m) <= (1 - tolerance) * target.
      wait(m) is the wait of a request with m engines, from the model in `queueing`.
    - Queue: a request that arrives now waits for about waiting / throughput (Little's law). If such
      a request will miss the TTFT target, the result is N, but at least n.
    - Busy: ceil(n * busy / target), but at most n. Busy engines without a queue need no more
      engines.
    """
    offered = n * role.busy

    def ttft_with(m: int) -> float:
        here = wait_quantile_s(n, min(offered, 0.999 * n), role.prefill_s, quantile)
        return (role.ttft_s or 0.0) - here + wait_quantile_s(m, offered, role.prefill_s, quantile)

    busy = Recommendation(
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
) -> Recommendation:
    if role.ttft_s is None:
        return Recommendation("TTFTAboveTarget", 1, "no first tokens")
    limit_s = (1 + tolerance) * targets.ttft_s
    text = _latency_text("TTFT", quantile, role.ttft_s, targets.ttft_s)
    if role.ttft_s <= limit_s or role.first_tokens < MIN_SAMPLES:
        return Recommendation(
            "TTFTAboveTarget",
            _fewest(n, lambda m: forecast(m) <= (1 - tolerance) * targets.ttft_s),
            text,
        )
    if role.queue_s < QUEUE_SHARE * targets.ttft_s and role.waiting < WAITING_PER_ENGINE:
        why = f"requests wait only {_time(role.queue_s)} for an engine"
        why += ": more engines would not help"
        return Recommendation("TargetUnreachable", n, f"{text}, but {why}")
    if _ttft_of_next_s(n, role) > limit_s:
        return Recommendation("TTFTAboveTarget", n, text)
    return Recommendation(
        "TTFTAboveTarget",
        max(n + 1, min(_needed(n, role, targets), _ceil(n * role.ttft_s / targets.ttft_s))),
        text,
    )


def _prefill_queue(n: int, role: RoleWindow, targets: Targets, tolerance: float) -> Recommendation:
    text = f"{role.waiting:.1f} prompts wait per engine"
    next_s = _ttft_of_next_s(n, role)
    if next_s > (1 + tolerance) * targets.ttft_s:
        after = (
            f"after {_time(next_s)}"
            if isfinite(next_s)
            else "at an unknown time, because no prompt was computed"
        )
        return Recommendation(
            "RequestsQueue",
            max(n, _needed(n, role, targets)),
            f"{text}, and the next one gets its first token {after}",
        )
    return Recommendation("RequestsQueue", 1 if role.waiting <= WAITING_AT_REST else n, text)


def _ttft_of_next_s(n: int, role: RoleWindow) -> float:
    """Return the expected TTFT in seconds of the next request to arrive.

    The result is 0 if fewer than WAITING_PER_ENGINE requests wait per engine. It is infinite if
    requests wait and no prompt was computed in the window.
    """
    if role.waiting < WAITING_PER_ENGINE:
        return 0.0
    return role.prefill_s + n * role.waiting / role.requests_per_s if role.requests_per_s else inf


def _needed(n: int, role: RoleWindow, targets: Targets) -> int:
    """Return N as defined in `recommend_prefill`: the number of prefill engines needed.

    The result is 2 * n if no request was computed in the window.
    """
    if role.requests_per_s == 0:
        return 2 * n
    engine_s = n * role.busy / role.requests_per_s
    arrivals = max(0.0, role.requests_per_s + role.waiting_growth_per_s)
    return _ceil(engine_s * (arrivals + n * role.waiting / DRAIN_S) / targets.busy)


def recommend_decode(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Recommendation]:
    """Return the recommendations for `n` decode engines whose prompts come from prefill engines.

    Let R be the number of running sequences, and g(m) = max(1, R / m) / max(1, R / n). If these
    sequences run on m engines instead of n, a step takes at most g(m) times as long.

    - ITL above target: ceil(n * ITL / target), if engines run more than one sequence or have a
      queue. Otherwise n, because more engines would not help.
    - ITL below target: the smallest m with ITL * g(m) <= (1 - tolerance) * target.
    - KV usage above target: ceil(n * usage / target).
    - KV usage below target: the smallest m with usage * (n / m) * g(m) <= target. The factor g(m)
      is needed because sequences also run longer on fewer engines.
    - Queue: ceil(n * (running + waiting) / running), if at least WAITING_PER_ENGINE requests wait
      per engine. This number of engines would run all requests at once.
    """
    return [
        _decode_latency(
            "ITL", role.itl_s, role.tokens, targets.itl_s, n, role, tolerance, quantile
        ),
        _kv_usage(n, role, targets, tolerance),
        _decode_queue(n, role),
    ]


def recommend_aggregated(
    n: int, role: RoleWindow, targets: Targets, tolerance: float, quantile: float
) -> list[Recommendation]:
    """Return the recommendations for `n` decode engines of a service without prefill engines.

    The rules of `recommend_decode` apply. The rules for ITL also apply to TTFT, because such
    engines compute prompts and tokens in the same steps.
    """
    ttft = _decode_latency(
        "TTFT", role.ttft_s, role.first_tokens, targets.ttft_s, n, role, tolerance, quantile
    )
    return [ttft, *recommend_decode(n, role, targets, tolerance, quantile)]


def _decode_latency(
    name: Literal["TTFT", "ITL"],
    latency_s: float | None,
    samples: float,
    target_s: float,
    n: int,
    role: RoleWindow,
    tolerance: float,
    quantile: float,
) -> Recommendation:
    reason: SizeReason = "TTFTAboveTarget" if name == "TTFT" else "ITLAboveTarget"
    if latency_s is None:
        return Recommendation(reason, 1, "no tokens")
    running = n * role.running
    latency = _latency_text(name, quantile, latency_s, target_s)
    text = f"{latency} with {role.running:.1f} sequences per engine"
    if latency_s > (1 + tolerance) * target_s and samples >= MIN_SAMPLES:
        if role.running > 1 or role.waiting >= WAITING_PER_ENGINE:
            return Recommendation(reason, _ceil(n * latency_s / target_s), text)
        return Recommendation("TargetUnreachable", n, f"{text}: more engines would not help")

    return Recommendation(
        reason,
        _fewest(n, lambda m: latency_s * _growth(n, m, running) <= (1 - tolerance) * target_s),
        text,
    )


def _growth(n: int, m: int, running: float) -> float:
    """Return g(m) as defined in `recommend_decode`.

    A step on `m` engines takes at most g(m) times as long as a step on `n` engines.

    Args:
        running: number of running sequences of all engines.
    """
    return max(1.0, running / m) / max(1.0, running / n)


def _kv_usage(n: int, role: RoleWindow, targets: Targets, tolerance: float) -> Recommendation:
    text = f"{role.kv_usage:.0%} of KV blocks are in use for a target of {targets.kv_usage:.0%}"
    if role.kv_usage > (1 + tolerance) * targets.kv_usage:
        return Recommendation("KVUsageHigh", _ceil(n * role.kv_usage / targets.kv_usage), text)

    def usage_with(m: int) -> float:
        return role.kv_usage * n / m * _growth(n, m, n * role.running)

    return Recommendation(
        "KVUsageHigh", _fewest(n, lambda m: usage_with(m) <= targets.kv_usage), text
    )


def _decode_queue(n: int, role: RoleWindow) -> Recommendation:
    text = f"{role.waiting:.1f} requests wait per engine"
    if role.waiting >= WAITING_PER_ENGINE:
        # An engine that has a queue but runs no sequence counts as if it ran one.
        running = max(1.0, role.running)
        return Recommendation("RequestsQueue", _ceil(n * (running + role.waiting) / running), text)
    return Recommendation("RequestsQueue", 1 if role.waiting <= WAITING_AT_REST else n, text)


def load_per_engine(n: int, prefill: bool, role: RoleWindow) -> float:
    """Return the load of one engine: the busy fraction for prefill, tokens per second for decode.

    Unlike the number of running requests, this load does not rise when requests become slower.
    """
    return role.busy if prefill else role.tokens_per_s / n


def recommend_after_breach(
    n: int, prefill: bool, role: RoleWindow, breach: Breach, tolerance: float
) -> Recommendation:
    """Recommend a size that avoids the load per engine at which a target was last missed.

    The result is the smallest size for which the load per engine is at most
    (1 - tolerance) * `breach.load_per_engine`. It is never larger than the current size `n`.
    """
    limit = (1 - tolerance) * breach.load_per_engine
    size = n if limit <= 0 else min(n, _ceil(n * load_per_engine(n, prefill, role) / limit))
    load = (
        f"were {breach.load_per_engine:.0%} busy"
        if prefill
        else f"generated {breach.load_per_engine:.0f} tokens/s each"
    )
    return Recommendation("RecentBreach", size, f"a target was recently missed when engines {load}")


def _ceil(size: float) -> int:
    """Return `size` rounded up to an integer from 1 to LARGEST.

    A size that exceeds an integer by at most 1e-9 is rounded down, as a floating-point error.
    """
    return max(1, ceil(min(size, LARGEST) - 1e-9))


def _fewest(n: int, meets: Callable[[int], bool]) -> int:
    """Return the smallest size below `n` for which `meets` returns True; `n` if there is none."""
    return next((m for m in range(1, n) if meets(m)), n)


def _latency_text(name: str, quantile: float, latency_s: float, target_s: float) -> str:
    return f"{name} p{quantile * 100:g} is {_time(latency_s)} for a target of {_time(target_s)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
