"""The decided size and its reason: a table of cases, sequences of decisions, and properties."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.autoscale.decision_history import Breach, Change, DecisionRun, History
from baton_operator.autoscale.holds import RoleState
from baton_operator.autoscale.policy import Behavior, Bounds, Decision, decide
from baton_operator.autoscale.recommendations import Targets
from baton_operator.autoscale.windows import RoleWindow, Window
from baton_operator.names import MemberRole

NOW = 10_000.0
TARGETS = Targets(ttft_s=1.0, itl_s=0.05)
BEHAVIOR = Behavior()
BOUNDS = Bounds(1, 10)

#: Four engines at their target.
PREFILL: dict[str, Any] = {
    "ttft_s": 0.95, "first_tokens": 600, "requests_per_s": 10.0, "prefill_s": 0.3, "queue_s": 0.2,
    "busy": 0.75,
}  # fmt: skip
DECODE: dict[str, Any] = {
    "itl_s": 0.048, "tokens": 60_000, "tokens_per_s": 1000.0, "running": 10.0, "kv_usage": 0.6,
}  # fmt: skip


def window(
    role: MemberRole, engines: int = 4, *, age: float = 0.0, gateways: int = 1, **fields: Any
) -> Window:
    demand = {name: fields.pop(name) for name in ("in_flight", "answered_at") if name in fields}
    usual = PREFILL if role == "prefill" else DECODE
    return Window(
        start=NOW - age - 60, end=NOW - age, quantile=0.95, gateways=gateways,
        roles={role: RoleWindow(engines=engines, **{**usual, **fields})},
        in_flight=demand.get("in_flight", 5.0),
        held=demand.get("in_flight", 5.0) if engines == 0 else 0.0,
        answered_at=demand.get("answered_at"), active_at=demand.get("answered_at"),
    )  # fmt: skip


def group(role: MemberRole, size: int = 4, **fields: Any) -> RoleState:
    return RoleState(**{"role": role, "size": size, "pods": size, "ready": size, **fields})


def settled(size: int, **fields: Any) -> History:
    """Return a history in which `size` was recommended for ten minutes."""
    return History(runs=(DecisionRun(size, NOW - 600, NOW - 15),), **fields)


def chosen(
    now_group: RoleState,
    measured: Window | None,
    history: History | None = None,
    bounds: Bounds = BOUNDS,
    behavior: Behavior = BEHAVIOR,
) -> Decision:
    return decide(NOW, now_group, bounds, TARGETS, measured, history or History(), behavior)


QUIET_PREFILL = {"ttft_s": 0.35, "queue_s": 0.01, "busy": 0.3}
QUIET_DECODE = {"itl_s": 0.02, "running": 2.0, "kv_usage": 0.2}
NOTHING = {
    "ttft_s": None, "first_tokens": 0, "itl_s": None, "tokens": 0, "requests_per_s": 0.0,
    "tokens_per_s": 0.0, "busy": 0.0,
    "running": 0.0, "queue_s": 0.0, "prefill_s": 0.0, "kv_usage": 0.0, "in_flight": 0,
}  # fmt: skip

BUSY_MOMENT = History(
    runs=(
        DecisionRun(1, NOW - 600, NOW - 200),
        DecisionRun(4, NOW - 200, NOW - 180),
        DecisionRun(1, NOW - 180, NOW - 15),
    )
)

SITUATIONS: dict[str, tuple[MemberRole, dict[str, Any], History, int, str]] = {
    # role, what differs from four engines at their target, history, expected size, reason
    "prefill at its target stays": ("prefill", {}, settled(4), 4, "OnTarget"),
    "decode at its target stays": ("decode", {}, settled(4), 4, "OnTarget"),
    "TTFT within the tolerance changes nothing": (
        "prefill", {"ttft_s": 1.09}, settled(4), 4, "OnTarget",
    ),
    "ITL within the tolerance changes nothing": (
        "decode", {"itl_s": 0.0549}, settled(4), 4, "OnTarget",
    ),
    "TTFT above target while requests wait adds prefill engines": (
        "prefill", {"ttft_s": 1.3, "queue_s": 0.6, "busy": 0.95}, History(), 5, "TTFTAboveTarget"),
    "TTFT far above target adds no more than the load needs": (
        "prefill", {"ttft_s": 9.0, "queue_s": 0.6, "busy": 0.95}, History(), 5, "TTFTAboveTarget"),
    "TTFT above target without a queue adds no engines": (
        "prefill", {"ttft_s": 1.5, "queue_s": 0.02}, History(), 4, "TargetUnreachable"),
    "a growing queue adds engines to keep up and to drain it": (
        "prefill", {"busy": 1.0, "waiting": 10.0, "waiting_growth_per_s": 2.0}, History(), 7,
        "RequestsQueue"),
    "a draining queue adds no engines": (
        "prefill",
        {
            "ttft_s": 30.0, "queue_s": 20.0, "busy": 1.0, "waiting": 10.0,
            "waiting_growth_per_s": -5.0,
        },
        History(), 4, "OnTarget"),
    "a queue that does not move doubles the size": (
        "prefill", {**NOTHING, "waiting": 3.0, "in_flight": 12}, History(), 8, "RequestsQueue"),
    "a quantile of too few requests is ignored": (
        "prefill", {"ttft_s": 5.0, "first_tokens": 19, "queue_s": 1.0}, settled(4), 4, "OnTarget"),
    "ITL above target adds decode engines by the ratio": (
        "decode", {"itl_s": 0.07}, History(), 6, "ITLAboveTarget"),
    "ITL above target of single sequences adds no engines": (
        "decode", {"itl_s": 0.07, "running": 0.9}, History(), 4, "TargetUnreachable"),
    "a full KV cache adds decode engines though ITL is fine": (
        "decode", {"itl_s": 0.02, "kv_usage": 1.0}, History(), 5, "KVUsageHigh"),
    "a queue at decode adds engines": ("decode", {"waiting": 5.0}, History(), 6, "RequestsQueue"),
    "a step up adds four pods, or doubles the size": (
        "decode", {"itl_s": 0.5}, History(), 8, "ITLAboveTarget"),
    "a step up counts the pods added within its period": (
        "decode", {"itl_s": 0.5}, History(changes=(Change(NOW - 30, 3),)), 5, "ITLAboveTarget"),
    "a single bad window changes nothing": ("decode", {"itl_s": 0.5}, settled(4), 4, "Stabilizing"),
    "a lasting recommendation is followed": (
        "decode", {"itl_s": 0.07},
        History(runs=(DecisionRun(4, NOW - 600, NOW - 45), DecisionRun(6, NOW - 40, NOW - 15))), 6,
        "ITLAboveTarget"),
    "the smallest recent recommendation is followed": (
        "decode", {"itl_s": 0.09}, History(runs=(DecisionRun(5, NOW - 40, NOW - 15),)), 5,
        "ITLAboveTarget"),
    "quiet prefill engines leave in steps": (
        "prefill", QUIET_PREFILL, settled(2), 3, "BelowTargets",
    ),
    "quiet decode engines leave in steps": ("decode", QUIET_DECODE, settled(2), 3, "BelowTargets"),
    "no more leave within the period": (
        "decode", QUIET_DECODE, settled(2, changes=(Change(NOW - 30, -1),)), 4, "Stabilizing"),
    "nothing leaves before the window of quiet is over": (
        "decode", QUIET_DECODE, History(runs=(DecisionRun(2, NOW - 290, NOW - 15),)), 4,
        "Stabilizing"),
    "a busy moment in the window keeps them": (
        "decode", QUIET_DECODE, BUSY_MOMENT, 4, "Stabilizing",
    ),
    "a restarted operator observes a whole window first": (
        "decode", QUIET_DECODE, History(runs=(DecisionRun(1, NOW - 9000, NOW - 400),)), 4,
        "Stabilizing"),
    "fast tokens do not shrink a group whose engines share many sequences": (
        "decode", {"itl_s": 0.04, "running": 20.0, "kv_usage": 0.1}, settled(4), 4, "OnTarget"),
    "sequences that share an engine with more others hold their KV for longer": (
        "decode", {"itl_s": 0.01, "running": 20.0, "kv_usage": 0.5}, settled(3), 4, "OnTarget"),
    "busy prefill engines stay though TTFT is far below its target": (
        "prefill", {"ttft_s": 0.3, "queue_s": 0.0, "prefill_s": 0.01, "busy": 0.79}, settled(4), 4,
        "OnTarget"),
    "a load that missed a target is not tried again within the hour": (
        "decode", QUIET_DECODE, settled(3, breach=Breach(NOW - 600, 270.0)), 4, "OnTarget"),
    "a load that missed a target is tried again after an hour": (
        "decode", QUIET_DECODE, settled(2, breach=Breach(NOW - 3601, 270.0)), 3, "BelowTargets",
    ),
    "a lower load than the one that missed a target is tried": (
        "decode", {**QUIET_DECODE, "tokens_per_s": 400.0},
        settled(2, breach=Breach(NOW - 600, 270.0)), 3, "BelowTargets"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_size_and_its_reason(situation: str) -> None:
    role, fields, history, size, reason = SITUATIONS[situation]
    decision = chosen(group(role), window(role, **fields), history)
    assert (decision.size, decision.reason) == (size, reason), decision.explanation
    assert decision.explanation.startswith(
        f"{role} stays at {size}: " if size == 4 else f"{role} 4 -> {size}: "
    )


HOLDS: dict[str, tuple[RoleState, Window | None, str]] = {
    "nothing was measured": (group("decode"), None, "MetricsMissing"),
    "old measurements": (group("decode"), window("decode", age=61, itl_s=0.5), "MetricsStale"),
    "an engine did not answer": (
        group("decode"), window("decode", engines=3, itl_s=0.5), "MetricsMissing",
    ),
    "no gateway answered": (
        group("decode"), window("decode", gateways=0, itl_s=0.5), "MetricsMissing",
    ),
    "an engine is not ready": (
        group("decode", ready=3), window("decode", itl_s=0.5), "PodsNotReady",
    ),
    "an engine drains": (group("decode", pods=5), window("decode", itl_s=0.5), "PodsNotReady"),
    "the topology changes": (
        group("decode", operation="a change of topology"), window("decode", itl_s=0.5),
        "OperationRunning",
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", HOLDS)
def test_unknown_values_and_running_changes_keep_the_size(situation: str) -> None:
    now_group, measured, reason = HOLDS[situation]
    decision = chosen(now_group, measured)
    assert (decision.size, decision.reason, decision.recommended) == (4, reason, 4)


def test_measurements_from_before_the_engines_were_ready_are_ignored() -> None:
    bad = window("decode", itl_s=0.5)
    starting = chosen(group("decode", ready=3), bad)
    assert starting.history.unsettled_until == NOW
    assert chosen(group("decode"), bad, starting.history).reason == "Settling"
    later = msgspec.structs.replace(bad, start=NOW + 5, end=NOW + 65)
    after = decide(NOW + 65, group("decode"), BOUNDS, TARGETS, later, starting.history, BEHAVIOR)
    assert (after.size, after.reason) == (8, "ITLAboveTarget")


def test_the_next_step_down_waits_for_new_measurements_but_not_for_a_whole_window() -> None:
    def at(seconds: float, now_group: RoleState, engines: int, history: History) -> Decision:
        now = NOW + seconds
        measured = msgspec.structs.replace(
            window("decode", engines, **QUIET_DECODE), start=now - 60, end=now
        )
        return decide(now, now_group, BOUNDS, TARGETS, measured, history, BEHAVIOR)

    first = at(0, group("decode"), 4, settled(2))
    leaving = at(15, group("decode", 3, pods=4, operation="a change of topology"), 4, first.history)
    draining = at(30, group("decode", 3, pods=4), 4, leaving.history)
    settling = at(60, group("decode", 3), 3, draining.history)
    second = at(90, group("decode", 3), 3, settling.history)
    decisions = [first, leaving, draining, settling, second]
    assert [d.reason for d in decisions] == [
        "BelowTargets",
        "OperationRunning",
        "PodsNotReady",
        "Settling",
        "BelowTargets",
    ]
    assert [d.size for d in decisions] == [3, 3, 3, 3, 2]


def test_a_size_outside_its_bounds_is_corrected_without_measurements() -> None:
    assert chosen(group("decode", 4), None, bounds=Bounds(6, 8)).size == 6
    decision = chosen(group("decode", 4), None, bounds=Bounds(0, 2))
    assert (decision.size, decision.reason) == (2, "OutOfBounds")


def test_the_reason_names_the_maximum() -> None:
    decision = chosen(group("decode"), window("decode", itl_s=0.1), bounds=Bounds(1, 4))
    assert (decision.size, decision.reason) == (4, "AtMaximum")
    assert decision.explanation == (
        "decode stays at 4: ITL p95 is 100 ms for a target of 50 ms with 10.0 sequences per "
        "engine, which calls for 8, "
        "but the maximum is 4."
    )


def test_decode_engines_that_prefill_are_sized_by_ttft() -> None:
    slow = window("decode", ttft_s=1.6, first_tokens=600)
    assert chosen(group("decode"), slow, settled(4)).reason == "OnTarget"
    decision = chosen(group("decode", aggregated=True), slow)
    assert (decision.size, decision.reason) == (7, "TTFTAboveTarget")


def test_scaling_to_zero_needs_the_idle_time_and_a_minimum_of_zero() -> None:
    idle = window("decode", **NOTHING)
    for minimum, quiet_s, size in ((0, 601, 0), (0, 590, 3), (1, 601, 3)):
        decision = chosen(
            group("decode"), idle, settled(1, idle_since=NOW - quiet_s), Bounds(minimum, 10)
        )
        assert decision.size == size, decision.explanation
    busy = window("decode", **{**NOTHING, "in_flight": 1})
    assert chosen(group("decode"), busy, settled(1, idle_since=NOW - 601), Bounds(0, 10)).size == 3
    silent = window("decode", **{**NOTHING, "gateways": 0})
    assert (
        chosen(group("decode"), silent, settled(1, idle_since=NOW - 601), Bounds(0, 10)).size == 4
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scaling_from_zero_starts_with_the_first_request(role: MemberRole) -> None:
    bounds = Bounds(0, 4)
    assert chosen(group(role, 0), window(role, 0, **NOTHING), bounds=bounds).reason == "Idle"
    for demand in ({"in_flight": 1}, {"answered_at": NOW - 2}):
        decision = chosen(group(role, 0), window(role, 0, **{**NOTHING, **demand}), bounds=bounds)
        assert (decision.size, decision.reason) == (1, "RequestsHeld")
    answered = window(role, 0, **NOTHING, answered_at=NOW - 4)
    asleep = History(changes=(Change(NOW - 2, -1),))
    assert chosen(group(role, 0), answered, asleep, bounds).reason == "Idle", (
        "an answered request must not scale up"
    )
    assert chosen(group(role, 0), None, bounds=bounds).reason == "MetricsMissing"


def test_the_idle_time_begins_with_the_last_request() -> None:
    behavior, bounds = Behavior(idle_s=8.0), Bounds(0, 4)
    for age, size in ((6.0, 1), (8.0, 0)):
        answered = window("decode", 1, **NOTHING, answered_at=NOW - age)
        assert chosen(group("decode", 1), answered, settled(1), bounds, behavior).size == size
    never = window("decode", 1, **NOTHING)
    assert chosen(group("decode", 1), never, History(), bounds, behavior).size == 0, (
        "a window without requests"
    )


def test_a_missed_target_is_remembered_after_a_step_down_only() -> None:
    slow = window("decode", itl_s=0.07)
    down = chosen(group("decode"), slow, History(changes=(Change(NOW - 900, -1),)))
    assert down.history.breach == Breach(NOW, 250.0)
    assert (
        chosen(group("decode"), slow, History(changes=(Change(NOW - 900, 1),))).history.breach
        is None
    )


fractions = st.floats(0, 1)
measurements = st.fixed_dictionaries(
    {
        "ttft_s": st.none() | st.floats(0.001, 100), "first_tokens": st.floats(0, 10_000),
        "itl_s": st.none() | st.floats(0.001, 5),
        "tokens": st.floats(0, 1e6), "tokens_per_s": st.floats(0, 1e5),
        "requests_per_s": st.floats(0, 1000),
        "queue_s": st.floats(0, 50), "prefill_s": st.floats(0, 10), "busy": fractions,
        "running": st.floats(0, 300),
        "waiting": st.floats(0, 300), "waiting_growth_per_s": st.floats(-100, 100),
        "kv_usage": fractions,
        "in_flight": st.integers(0, 5),
    }
)  # fmt: skip
histories = st.builds(
    History,
    runs=st.lists(st.tuples(st.integers(0, 20), st.floats(1, 300)), max_size=4).map(
        lambda items: tuple(
            DecisionRun(
                size,
                NOW - 15 - sum(s for _, s in items[i:]),
                NOW - 15 - sum(s for _, s in items[i + 1 :]),
            )
            for i, (size, _) in enumerate(items)
        )
    ),
    changes=st.lists(
        st.builds(Change, st.floats(NOW - 120, NOW), st.integers(-3, 3)), max_size=3
    ).map(tuple),
    breach=st.none() | st.builds(Breach, st.floats(NOW - 7200, NOW), st.floats(0, 500)),
    idle_since=st.none() | st.floats(NOW - 2000, NOW),
)
roles = st.sampled_from(["prefill", "decode"])


@settings(max_examples=400)
@given(
    roles,
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 10),
    measurements,
    histories,
    st.booleans(),
    st.booleans(),
)
def test_bounds_and_steps_always_hold(
    role: MemberRole,
    size: int,
    maximum: int,
    minimum: int,
    fields: dict[str, Any],
    history: History,
    alone: bool,
    ready: bool,
) -> None:
    bounds = Bounds(min(minimum, max(1, maximum)), max(1, maximum))
    now_group = group(
        role, size, aggregated=alone and role == "decode", ready=size if ready else max(0, size - 1)
    )
    decision = chosen(now_group, window(role, size, **fields), history, bounds)
    assert bounds.min <= decision.size <= bounds.max
    if bounds.min <= size <= bounds.max:
        assert decision.size <= max(2 * size, size + BEHAVIOR.up_step)
        assert decision.size in (0, size) or decision.size >= size - max(1, size // 4) or not ready
        if not ready and size:
            assert decision.size in (0, size)


@settings(max_examples=400)
@given(roles, st.integers(1, 20), measurements, histories, st.data())
def test_higher_latency_or_usage_never_gives_a_smaller_size(
    role: MemberRole, size: int, fields: dict[str, Any], history: History, data: st.DataObject
) -> None:
    worse = data.draw(st.sampled_from(["queue_s", "kv_usage", "ttft_s", "itl_s"]), "worse")
    before = fields[worse] or 0.0
    changed = {**fields, worse: before + data.draw(st.floats(0, 20), "by")}
    bounds = Bounds(1, 100)
    alone = role == "decode" and data.draw(st.booleans(), "aggregated")
    less = chosen(
        group(role, size, aggregated=alone), window(role, size, **fields), history, bounds
    )
    more = chosen(
        group(role, size, aggregated=alone), window(role, size, **changed), history, bounds
    )
    assert more.size >= less.size, (less.explanation, more.explanation)
    assert more.recommended >= less.recommended


@given(st.integers(1, 10), st.lists(st.floats(0.92, 1.09), min_size=1, max_size=40), roles)
def test_noise_within_the_tolerance_does_not_change_the_size(
    size: int, noise: list[float], role: MemberRole
) -> None:
    history, now_group = History(), group(role, size)
    for step, factor in enumerate(noise):
        now = NOW + 15 * step
        field, target = (
            ("ttft_s", TARGETS.ttft_s) if role == "prefill" else ("itl_s", TARGETS.itl_s)
        )
        measured = msgspec.structs.replace(
            window(role, size, **{field: target * factor}), start=now - 60, end=now
        )
        decision = decide(now, now_group, BOUNDS, TARGETS, measured, history, BEHAVIOR)
        assert decision.size == size, decision.explanation
        history = decision.history
