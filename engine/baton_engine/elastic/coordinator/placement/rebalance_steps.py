"""Chooses the moves of a rebalance that reduce the imbalance most, up to a limit. Pure functions.

A step takes load from the heaviest rank of one layer:

swap   the heaviest rank and a lighter rank exchange two experts (2 moves)
copy   a lighter rank drops an expert of which other ranks have copies, and receives a copy of an
       expert of the heaviest rank (1 move)

Steps keep the number of slots of each rank, and at least one copy of each expert. Over all layers,
the step that decreases the sum of squared rank loads most per move comes first. The squares give
priority to the ranks that are furthest above the mean.

After a step, each changed rank is lighter than the heaviest rank was before the step. Therefore no
layer's imbalance increases.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton_engine.elastic.coordinator.placement.expert_placement import TOLERANCE, fill_slots
from baton_protocol.topology import Placement

#: A step must decrease the load of the heaviest rank by at least this fraction of the mean rank
#: load. A smaller decrease can be noise in the measured loads.
MIN_DECREASE = 0.02


def first_moves(placement: Placement, loads: Sequence[Sequence[int]], max_moves: int) -> Placement:
    """Apply moves to a placement, first those that reduce the imbalance most. Return the result.

    Args:
        placement: the present placement.
        loads: [layer][expert], tokens.
        max_moves: maximum number of experts that ranks receive, over all layers.
    """
    layers = [_Layer(slots, load) for slots, load in zip(placement, loads, strict=True)]
    best: list[tuple[float, int, _Step]] = []

    def add(index: int) -> None:
        if step := layers[index].best_step(max_moves - num_moves):
            heapq.heappush(best, (-step.value, index, step))

    num_moves = 0
    for index in range(len(layers)):
        add(index)
    while best:
        _, index, step = heapq.heappop(best)
        if num_moves + step.moves <= max_moves:
            num_moves += step.moves
            layers[index].take(step)
        add(index)
    return tuple(
        tuple(
            fill_slots(sorted(experts), slots)
            for experts, slots in zip(layer.ranks, before, strict=True)
        )
        if layer.is_changed
        else before
        for layer, before in zip(layers, placement, strict=True)
    )


class _Step(NamedTuple):
    """One step of a rebalance, which moves load from rank `heavy` to rank `light`.

    A swap exchanges expert `there` of `heavy` and expert `back` of `light`. A copy replaces `back`
    on `light` by a copy of `there`.
    """

    #: Decrease of the sum of squared rank loads, in units of the mean load squared, per move.
    value: float
    #: Number of experts that ranks must receive for this step. Negative: the step returns experts
    #: to ranks that held these experts before the rebalance.
    moves: int
    is_swap: bool
    heavy: int
    there: int
    light: int
    back: int


class _Layer:
    """The experts that each rank holds in one layer, to which steps are applied."""

    def __init__(self, slots: Sequence[Sequence[int]], load: Sequence[int]) -> None:
        self.ranks = [set(experts) for experts in slots]
        self.is_changed = False
        self._before = [frozenset(experts) for experts in slots]
        # Ranks hold an expert twice only if they hold all experts. Then no step can help.
        self._is_fixed = any(len(set(experts)) < len(experts) for experts in slots)
        self._load = load
        self._holders: list[set[int]] = [set() for _ in load]
        for rank, experts in enumerate(self.ranks):
            for expert in experts:
                self._holders[expert].add(rank)
        self._mean = sum(load) / len(slots)
        self._rank_loads = [sum(map(self._weight, experts)) for experts in self.ranks]

    def best_step(self, max_moves: int) -> _Step | None:
        """Return the best step of at most `max_moves` moves that takes load from the heaviest rank.

        The load goes to the lightest rank for which a step exists. None: no such step exists, or
        the layer is balanced.
        """
        if self._is_fixed:
            return None
        heavy, *others = sorted(
            range(len(self.ranks)), key=lambda rank: (-self._rank_loads[rank], rank)
        )
        if self._rank_loads[heavy] <= (1 + TOLERANCE) * self._mean:
            return None
        for light in reversed(others):
            steps = [step for step in self._steps(heavy, light) if step.moves <= max_moves]
            if steps:
                return max(steps, key=lambda step: (step.value, -step.there, -step.back))
        return None

    def take(self, step: _Step) -> None:
        for rank, change in self._changes(step).items():
            self._rank_loads[rank] += change
        self._replace(step.light, step.back, step.there)
        if step.is_swap:
            self._replace(step.heavy, step.there, step.back)
        self.is_changed = True

    def _steps(self, heavy: int, light: int) -> Iterator[_Step]:
        """Yield up to two swaps and one copy for each expert that `heavy` holds and `light` lacks.

        The two swaps are those after which the loads of both ranks are closest to each other. Steps
        that improve the balance too little are left out.
        """
        only_heavy = sorted(self.ranks[heavy] - self.ranks[light])
        by_weight = sorted(
            self.ranks[light] - self.ranks[heavy], key=lambda each: (self._weight(each), each)
        )
        weights = [self._weight(expert) for expert in by_weight]
        copied = [expert for expert in self.ranks[light] if len(self._holders[expert]) > 1]
        dropped = min(
            copied,
            key=lambda each: (self._load[each] / (len(self._holders[each]) - 1), each),
            default=None,
        )
        wanted = (self._rank_loads[heavy] - self._rank_loads[light]) / 2
        for there in only_heavy:
            # An ideal swap makes both ranks equally heavy.
            place = bisect.bisect_left(weights, self._weight(there) - wanted)
            for back in by_weight[max(0, place - 1) : place + 1]:
                yield from self._if_it_helps(heavy, there, light, back, is_swap=True)
            if dropped is not None:
                yield from self._if_it_helps(heavy, there, light, dropped, is_swap=False)

    def _if_it_helps(
        self, heavy: int, there: int, light: int, back: int, *, is_swap: bool
    ) -> Iterator[_Step]:
        moves = self._moves(light, back, there)
        if is_swap:
            moves += self._moves(heavy, there, back)
        step = _Step(0.0, moves, is_swap, heavy, there, light, back)
        loads = self._rank_loads
        changes = {rank: (loads[rank], change) for rank, change in self._changes(step).items()}
        decrease = sum(load**2 - (load + change) ** 2 for load, change in changes.values())
        heaviest = max(load + change for load, change in changes.values())
        least = MIN_DECREASE * self._mean
        if decrease > least**2 and heaviest <= loads[heavy] - least:
            yield step._replace(value=decrease / self._mean**2 / (1 + is_swap))

    def _changes(self, step: _Step) -> dict[int, float]:
        """Return the change of load that the step causes, for each rank whose load changes."""
        there, back = self._weight(step.there), self._weight(step.back)
        if step.is_swap:
            return {step.heavy: back - there, step.light: there - back}
        changes: dict[int, float] = {}
        fewer = self._load[step.there] / (len(self._holders[step.there]) + 1)
        more = self._load[step.back] / (len(self._holders[step.back]) - 1)
        for rank in self._holders[step.there]:
            changes[rank] = fewer - there
        for rank in self._holders[step.back] - {step.light}:
            changes[rank] = changes.get(rank, 0.0) + more - back
        changes[step.light] = fewer - back
        return changes

    def _moves(self, rank: int, leaves: int, comes: int) -> int:
        before = self._before[rank]
        return (comes not in before) - (leaves not in before)

    def _replace(self, rank: int, leaves: int, comes: int) -> None:
        self.ranks[rank].remove(leaves)
        self.ranks[rank].add(comes)
        self._holders[leaves].remove(rank)
        self._holders[comes].add(rank)

    def _weight(self, expert: int) -> float:
        """Return the load of one copy of the expert: its load divided by its number of copies."""
        return self._load[expert] / len(self._holders[expert])
