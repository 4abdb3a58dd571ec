"""Rebalancing with a limit of moves: never more, never worse, without an end that oscillates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.placement.balance import MIN_CHOICES, Balance, Rebalancing
from baton_engine.elastic.coordinator.placement.expert_placement import (
    TOLERANCE,
    count_moves,
    imbalance,
    plan_placement,
)
from baton_engine.elastic.coordinator.placement.rebalance_steps import first_moves
from baton_engine.elastic.coordinator.roster import Roster
from baton_protocol.topology import (
    ExpertLoads,
    Generation,
    Placement,
    RankPhase,
    Status,
    TopologyMember,
)

Loads = list[list[int]]
EXPERT_BYTES = 100


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, int, Loads]:
    """Draw a placement that is balanced for other loads, its redundant experts, and loads."""
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(2, 16))
    num_ranks, num_redundant = draw(st.integers(2, 6)), draw(st.integers(0, 8))
    tokens = st.integers(0, 10) | st.integers(0, 100_000)
    layer = st.lists(tokens, min_size=num_experts, max_size=num_experts)
    loads = st.lists(layer, min_size=num_layers, max_size=num_layers)
    ids = [f"i{rank}" for rank in range(num_ranks)]
    placement = plan_placement(num_layers, num_experts, ids, num_redundant, draw(loads))
    return placement, num_redundant, draw(loads)


def moves_between(before: Placement, after: Placement) -> int:
    ids = [str(rank) for rank in range(len(before[0]))]
    return count_moves((before, ids), (after, ids))


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 30))
def test_the_limit_holds_and_no_layer_gets_worse(
    case: tuple[Placement, int, Loads], max_moves: int
) -> None:
    before, _, loads = case
    after = first_moves(before, loads, max_moves)
    assert moves_between(before, after) <= max_moves
    for ratio, ratio_before in zip(imbalance(after, loads), imbalance(before, loads), strict=True):
        assert ratio <= ratio_before * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 30))
def test_ranks_keep_their_number_of_slots_and_every_expert_has_a_copy(
    case: tuple[Placement, int, Loads], max_moves: int
) -> None:
    before, _, loads = case
    after = first_moves(before, loads, max_moves)
    for layer_before, layer in zip(before, after, strict=True):
        assert [len(slots) for slots in layer] == [len(slots) for slots in layer_before]
        assert set().union(*layer) == set().union(*layer_before)
        for slots, slots_before in zip(layer, layer_before, strict=True):
            assert len(set(slots)) == len(set(slots_before)), "a rank holds an expert twice"


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 6))
def test_repeated_moves_with_the_same_loads_end(
    case: tuple[Placement, int, Loads], max_moves: int
) -> None:
    placement, _, loads = case
    seen = {placement}
    for _ in range(500):
        following = first_moves(placement, loads, max_moves)
        if following == placement:
            return
        assert following not in seen, "an earlier placement came back"
        seen.add(following)
        placement = following
    raise AssertionError("the moves did not end")


def test_the_most_valuable_moves_come_first() -> None:
    """The second layer is more skewed. Its two hot experts are on the first rank."""
    before = (((0, 1), (2, 3)), ((0, 1), (2, 3)))
    loads = [[60, 60, 40, 40], [100, 100, 0, 0]]
    after = first_moves(before, loads, 2)
    assert after[0] == before[0]
    assert imbalance(after, loads)[1] == pytest.approx(1.0)
    assert imbalance(first_moves(before, loads, 4), loads) == [pytest.approx(1.0)] * 2


def test_a_hot_expert_gets_the_copy_of_a_cold_one() -> None:
    """Experts 0 and 3 have two copies. One move gives expert 1 the copy of expert 3."""
    before = (((0, 1), (2, 3), (0, 3)),)
    loads = [[10, 100, 10, 0]]
    after = first_moves(before, loads, 1)
    assert moves_between(before, after) == 1
    assert sum(slots.count(1) for slots in after[0]) == 2
    assert imbalance(after, loads)[0] < imbalance(before, loads)[0]


def test_a_nearly_balanced_layer_is_left_alone() -> None:
    loads = [[round(100 * (1 + TOLERANCE)), 100, 100, 100]]
    before = (((0,), (1,), (2,), (3,)),)
    assert first_moves(before, loads, 10) == before


def test_a_step_must_reduce_the_heaviest_load_by_2_percent() -> None:
    """Every useful swap takes less than 1% of the mean load from the first rank."""
    loads = [[600, 590, 10, 595]]
    before = (((0, 1), (2, 3)),)
    assert first_moves(before, loads, 10) == before


class Windows:
    """A group's Balance, whose ranks report loads once per window."""

    def __init__(
        self, placement: Placement, num_redundant: int, max_moves: int, threshold: float
    ) -> None:
        config = ControllerConfig(
            rebalance_threshold=threshold,
            rebalance_window_s=10.0,
            rebalance_max_move_bytes=float(max_moves * EXPERT_BYTES),
        )
        self._members = tuple(
            TopologyMember(f"r{rank}", f"i{rank}", "10.0.0.1", 1, 2, 3)
            for rank in range(len(placement[0]))
        )
        self._redundant = num_redundant
        self._roster = Roster(1e9, 1e9)
        self._balance = Balance(self._roster, config)
        self._now = 0.0
        self._number = 0
        self.placement = placement
        self.start(placement)

    def start(self, placement: Placement) -> None:
        """Start a generation with `placement`."""
        self.placement = placement
        self._number += 1
        number = self._number
        self._present = Generation(number, f"{number}.n", self._members, placement, "10.0.0.1", 3)
        num_experts = 1 + max(expert for slots in placement[0] for expert in slots)
        self._total = [[0] * num_experts for _ in placement]
        self._report()
        assert self._balance.due(self._present, self._now) is None

    def run(self, loads: Loads) -> Rebalancing | None:
        """Return what is due after a window with these loads."""
        for total, layer in zip(self._total, loads, strict=True):
            for expert, tokens in enumerate(layer):
                total[expert] += tokens
        self._now += 10.0
        self._report()
        return self._balance.due(self._present, self._now)

    def _report(self) -> None:
        """Let the first rank report all tokens, and the others none."""
        for rank, member in enumerate(self._members):
            tokens = self._total if rank == 0 else [[0] * len(layer) for layer in self._total]
            status = Status(
                member,
                RankPhase.SERVING,
                len(self._total[0]),
                len(self._total),
                self._redundant,
                generation=self._present,
                loads=ExpertLoads(tuple(map(tuple, tokens))),
                expert_bytes=EXPERT_BYTES,
            )
            self._roster.on_status(status, self._now)
        self._roster.update(self._now)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 8), st.floats(1.01, 1.5), st.randoms(use_true_random=False))
def test_steady_loads_with_noise_never_bring_a_placement_back(
    case: tuple[Placement, int, Loads],
    max_moves: int,
    threshold: float,
    noise: random.Random,
) -> None:
    """The noise is 0.5% of each expert's load. A limit of 0 moves means no limit."""
    placement, num_redundant, loads = case
    least = MIN_CHOICES * len(placement[0]) * 2
    true_loads = [[tokens * least // (sum(layer) or 1) for tokens in layer] for layer in loads]
    windows = Windows(placement, num_redundant, max_moves, threshold)
    seen, quiet = {placement}, 0
    while quiet < 10:
        due = windows.run(
            [
                [round(tokens * noise.uniform(0.995, 1.005)) for tokens in each]
                for each in true_loads
            ]
        )
        quiet += 1
        if due is None:
            continue
        quiet = 0
        assert due.after < due.before * (1 + 1e-9)
        assert due.before > threshold
        assert not max_moves or moves_between(windows.placement, due.placement) <= max_moves
        assert due.placement not in seen, "an earlier placement came back"
        seen.add(due.placement)
        windows.start(due.placement)
        assert len(seen) < 200, "the moves did not end"


def test_a_rebalance_must_gain_5_percent_over_all_layers() -> None:
    """The first layer cannot be improved. The second one gains 10%, and the mean 4%."""
    placement = (((0, 1), (2, 3)),) * 2
    loads = [[60_000, 59_000, 1_000, 59_500], [30_000, 25_000, 25_000, 20_000]]
    assert sum(imbalance(placement, loads)) / 2 > 1.2
    assert Windows(placement, 0, 0, 1.2).run(loads) is None
    loads[1] = [30_000, 30_000, 20_000, 20_000]
    assert Windows(placement, 0, 0, 1.2).run(loads) is not None


def test_moves_that_exceed_the_limit_follow_in_later_windows() -> None:
    """Two layers need a swap of two experts each, and the limit is two experts per window."""
    placement = (((0, 1), (2, 3)),) * 2
    loads = [[30_000, 30_000, 100, 100], [30_000, 30_000, 10_000, 10_000]]
    windows = Windows(placement, 0, 2, 1.2)
    ratios = []
    while (due := windows.run(loads)) is not None:
        ratios.append(max(imbalance(due.placement, loads)))
        windows.start(due.placement)
    assert ratios == [pytest.approx(1.5), pytest.approx(1.0)]
