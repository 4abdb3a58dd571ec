"""The autoscaler with a simulated service: it reaches and keeps sizes that meet the targets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.autoscale.policy import Bounds
from baton_operator.autoscale.recommendations import Targets
from baton_operator.names import MEMBER_ROLES
from support.operator.simulation.autoscale import PERIOD_S, Simulation, Workload

TARGETS = Targets(ttft_s=1.0, itl_s=0.025)


def assert_meets_targets(simulation: Simulation) -> None:
    ttft_s, itl_s = simulation.latency("prefill"), simulation.latency("decode")
    assert ttft_s is not None
    assert itl_s is not None
    assert ttft_s <= 1.1 * simulation.targets.ttft_s
    assert itl_s <= 1.1 * simulation.targets.itl_s


@pytest.mark.parametrize("start", [3, 10])
def test_sizes_for_a_constant_load_are_reached_from_both_sides_and_kept(start: int) -> None:
    # 20 prompts of 0.2 s keep 4 engines busy. 2000 tokens per second on 2 decode engines take
    # 20 ms each.
    simulation = Simulation(lambda _: 20.0, TARGETS, start={"prefill": start, "decode": start})
    simulation.run(100 * PERIOD_S)
    assert_meets_targets(simulation)
    assert 5 <= simulation.size("prefill") <= 6
    assert 2 <= simulation.size("decode") <= 3
    simulation.run(160 * PERIOD_S)
    assert_meets_targets(simulation)
    assert [simulation.changes(role, since=100 * PERIOD_S) for role in MEMBER_ROLES] == [[], []]


def test_sizes_follow_a_step_of_load_without_oscillation() -> None:
    up_s, down_s, end_s = 600.0, 2100.0, 3600.0
    simulation = Simulation(
        lambda t: 30.0 if up_s < t < down_s else 6.0, TARGETS, start={"prefill": 2, "decode": 1}
    )
    simulation.run(up_s)
    before = {role: simulation.size(role) for role in MEMBER_ROLES}
    simulation.run(up_s + 50 * PERIOD_S)
    assert_meets_targets(simulation)
    assert simulation.size("prefill") >= 8
    simulation.run(end_s)
    assert_meets_targets(simulation)
    for role in MEMBER_ROLES:
        assert simulation.size(role) <= before[role] + 1
        signs = [step > 0 for step in simulation.changes(role, since=up_s)]
        turns = sum(a != b for a, b in pairwise(signs))
        assert turns == 1, f"{role}: {simulation.changes(role, since=up_s)}"


def test_decode_engines_with_few_kv_blocks_reach_a_stable_size() -> None:
    # Two engines of 20 sequences would stay full, because more sequences make each one slower.
    simulation = Simulation(
        lambda _: 20.0,
        Targets(ttft_s=1.0, itl_s=0.2),
        workload=Workload(max_sequences=20),
        start={"prefill": 6, "decode": 6},
    )
    simulation.run(2400.0)
    assert simulation.size("decode") == 3
    assert all(step < 0 for step in simulation.changes("decode"))


def test_a_service_scales_to_zero_and_back() -> None:
    simulation = Simulation(
        lambda t: 5.0 if t < 300 or 1500 < t < 2100 else 0.0,
        TARGETS,
        prefill_bounds=Bounds(0, 8),
        decode_bounds=Bounds(0, 8),
        start={"prefill": 2, "decode": 1},
    )
    simulation.run(1500.0)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [0, 0]
    simulation.run(1500.0 + 2 * PERIOD_S)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [1, 1]
    simulation.run(2100.0)
    assert not simulation.held
    assert_meets_targets(simulation)
    simulation.run(3300.0)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [0, 0]


def test_a_target_that_no_size_can_meet_does_not_lead_to_the_maximum() -> None:
    simulation = Simulation(
        lambda _: 3.0, Targets(ttft_s=0.1, itl_s=0.008), start={"prefill": 4, "decode": 1}
    )
    simulation.run(1800.0)
    assert simulation.size("prefill") <= 5
    reasons = {decision.reason for _, decision in simulation.decisions[-2:]}
    assert "TargetUnreachable" in reasons


@settings(max_examples=4, deadline=None)
@given(
    rate=st.floats(1.0, 40.0),
    start=st.integers(1, 12),
    bounds=st.tuples(st.integers(1, 4), st.integers(5, 16)),
    seed=st.integers(0, 99),
)
def test_any_constant_load_leads_to_a_size_in_bounds_without_oscillation(
    rate: float, start: int, bounds: tuple[int, int], seed: int
) -> None:
    low, high = bounds

    def simulated(until: float) -> Simulation:
        simulation = Simulation(
            lambda _: rate,
            TARGETS,
            prefill_bounds=Bounds(low, high),
            decode_bounds=Bounds(low, high),
            start={"prefill": start, "decode": start},
            seed=seed,
        )
        simulation.run(until)
        return simulation

    simulation = simulated(1800.0)
    for role in MEMBER_ROLES:
        later = [sizes[role] for at, sizes in simulation.sizes if at > PERIOD_S]
        assert all(low <= size <= high for size in later)
        signs = [step > 0 for step in simulation.changes(role, since=600.0)]
        assert sum(a != b for a, b in pairwise(signs)) <= 1, simulation.changes(role)
        assert len(simulation.changes(role, since=1350.0)) <= 1, simulation.changes(role)
    again = simulated(450.0).decisions
    assert again == simulation.decisions[: len(again)], (
        "equal measurements led to different decisions"
    )
