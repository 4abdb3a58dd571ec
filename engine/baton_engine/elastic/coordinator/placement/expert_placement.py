"""The placement of experts on ranks, balanced by load with few moves. Pure functions.

The steps for each sparse layer are similar to EPLB (DeepSeek-AI, "Expert Parallelism Load
Balancer", 2025):

replicate  give each slot beyond one per expert to the expert with the highest load per copy
pack       give copies, heaviest first, to the lightest rank with a free slot (longest processing
           time first)
refine     swap two copies between the heaviest and the lightest rank while a swap helps

A rank holds two copies of one expert only if it has more slots than there are experts.

`refine` bounds the result. Let w be the largest load of one copy. If the loads of two ranks with
equally many slots differ by more than w, the ranks have copies (a, b) with 0 < a - b <= w. A swap
of a and b makes the heavier rank lighter. When no swap helps, heaviest - lightest <= w, and
therefore

    heaviest rank <= mean + w <= 2 * max(mean, w)

No packing of these copies has a heaviest rank below max(mean, w).

With a previous placement, ranks keep the experts that they had. Surplus copies are dropped, and
only unassigned copies are packed. The result is compared with a fresh placement, which is computed
without the previous placement. The tolerance limits how much heavier the heaviest rank may be than
the heaviest rank of the fresh placement. If swaps do not reach this limit, the fresh placement is
used.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from baton_protocol.topology import Placement

#: Default of the argument `tolerance` of `plan_placement`.
TOLERANCE = 0.05
#: Swaps end when the load of the heaviest rank exceeds its lower bound by at most this fraction of
#: the bound.
FINE = 0.01

#: [rank][slot]: expert, in any order of slots.
Layer = list[list[int]]


def plan_placement(
    num_layers: int,
    num_experts: int,
    instance_ids: Sequence[str],
    num_redundant: int = 0,
    loads: Sequence[Sequence[int]] | None = None,
    previous: tuple[Placement, Sequence[str]] | None = None,
    tolerance: float = TOLERANCE,
) -> Placement:
    """Compute a placement with ceil((num_experts + num_redundant) / ranks) slots per rank.

    The result is deterministic.

    Args:
        num_layers: number of sparse layers.
        num_experts: number of experts in each layer.
        instance_ids: instance ids in rank order.
        num_redundant: minimum number of slots beyond one per expert.
        loads: [layer][expert], tokens. None: all experts have the same load.
        previous: the present placement and the instance ids of its ranks. None: no rank holds
            experts.
        tolerance: how much the heaviest rank's load may exceed that of a placement planned without
            `previous`. 0.1 means 10%. A higher value moves fewer experts. With infinity, no expert
            moves for balance alone.

    Raises:
        ValueError: the arguments contradict each other.
    """
    num_ranks = len(instance_ids)
    if not num_ranks or num_experts < 1 or num_redundant < 0 or len(set(instance_ids)) != num_ranks:
        raise ValueError(
            f"no placement of {num_experts} experts and {num_redundant} redundant slots exists for "
            f"ranks {list(instance_ids)}"
        )
    if loads is not None and [len(layer) for layer in loads] != [num_experts] * num_layers:
        raise ValueError(
            f"the shape of the loads is not {num_layers} layers of {num_experts} experts"
        )
    if previous is not None and len(previous[0]) != num_layers:
        raise ValueError(
            f"the previous placement has {len(previous[0])} layers instead of {num_layers}"
        )
    num_slots = -(-(num_experts + num_redundant) // num_ranks)
    placement = []
    for index in range(num_layers):
        load = [float(tokens) for tokens in loads[index]] if loads is not None else []
        if not any(load):
            load = [1.0] * num_experts
        held = {} if previous is None else dict(zip(previous[1], previous[0][index], strict=True))
        if any(not 0 <= each < num_experts for slots in held.values() for each in slots):
            raise ValueError(f"the previous placement has experts outside 0 to {num_experts - 1}")
        before = [held.get(instance_id, ()) for instance_id in instance_ids]
        layer = _plan_layer(load, num_ranks, min(num_slots, num_experts), before, tolerance)
        surplus = [expert % num_experts for expert in range(num_slots - len(layer[0]))]
        placement.append(
            tuple(
                fill_slots(experts + surplus, slots)
                for experts, slots in zip(layer, before, strict=True)
            )
        )
    return tuple(placement)


def count_moves(
    previous: tuple[Placement, Sequence[str]], following: tuple[Placement, Sequence[str]]
) -> int:
    """Return how many experts the ranks of `following` must receive, summed over all layers.

    A rank must receive each expert that it does not hold in `previous`.

    Args:
        previous: a placement and the instance ids of its ranks.
        following: the next placement and the instance ids of its ranks.
    """
    moves = 0
    for old_layer, new_layer in zip(previous[0], following[0], strict=True):
        held = dict(zip(previous[1], old_layer, strict=True))
        for instance_id, slots in zip(following[1], new_layer, strict=True):
            moves += len(set(slots) - set(held.get(instance_id, ())))
    return moves


def imbalance(placement: Placement, loads: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each layer, the load of the heaviest rank divided by the mean load.

    The tokens of an expert are divided evenly over its copies. 1.0 means balanced, or no tokens.
    """
    ratios = []
    for layer, load in zip(placement, loads, strict=True):
        copies = [0] * len(load)
        for slots in layer:
            for expert in slots:
                copies[expert] += 1
        mean = sum(load) / len(layer)
        heaviest = max(sum(load[expert] / copies[expert] for expert in slots) for slots in layer)
        ratios.append(heaviest / mean if mean else 1.0)
    return ratios


def _plan_layer(
    load: list[float],
    num_ranks: int,
    num_slots: int,
    before: list[tuple[int, ...]],
    tolerance: float,
) -> Layer:
    copies = _replicate(load, num_ranks, num_slots, [1] * len(load))
    fresh = _Packing(load, copies, num_slots, [set() for _ in before])
    fresh.pack()
    fresh.refine((1 + FINE) * fresh.lower_bound)
    held = [set(slots) for slots in before]
    if not any(held):
        return fresh.layer
    load_limit = (1 + tolerance) * max(fresh.rank_loads)
    num_held = [sum(expert in experts for experts in held) for expert in range(len(load))]
    for wanted in (_replicate(load, num_ranks, num_slots, num_held), copies):
        packing = _Packing(load, wanted, num_slots, held)
        packing.keep()
        packing.pack()
        packing.refine(load_limit)
        if max(packing.rank_loads) <= load_limit:
            return packing.layer
    return _permute_for_few_moves(fresh.layer, held)


def _permute_for_few_moves(layer: Layer, held: list[set[int]]) -> Layer:
    """Return the layer's placement, with its ranks permuted so that few experts move."""
    ranks = range(len(held))
    common = [
        (-len(held[rank].intersection(layer[part])), rank, part) for rank in ranks for part in ranks
    ]
    parts: dict[int, int] = {}
    taken = set()
    for _, rank, part in sorted(common):
        if rank not in parts and part not in taken:
            parts[rank] = part
            taken.add(part)
    return [layer[parts[rank]] for rank in ranks]


def _replicate(load: list[float], num_ranks: int, num_slots: int, at_first: list[int]) -> list[int]:
    """Return the number of copies of each expert, 1 to num_ranks, so that all slots are filled.

    The computation starts with the numbers of copies in `at_first`. It adds copies where the load
    per copy is highest, or removes copies where the load per remaining copy is lowest.
    """
    copies = [min(max(count, 1), num_ranks) for count in at_first]
    num_to_add = num_ranks * num_slots - sum(copies)
    if num_to_add > 0:
        heap = [
            (-load[expert] / count, count, expert)
            for expert, count in enumerate(copies)
            if count < num_ranks
        ]
        heapq.heapify(heap)
        for _ in range(num_to_add):
            _, count, expert = heap[0]
            copies[expert] = count + 1
            if count + 1 < num_ranks:
                heapq.heapreplace(heap, (-load[expert] / (count + 1), count + 1, expert))
            else:
                heapq.heappop(heap)
    elif num_to_add < 0:
        heap = [
            (load[expert] / (count - 1), -count, expert)
            for expert, count in enumerate(copies)
            if count > 1
        ]
        heapq.heapify(heap)
        for _ in range(-num_to_add):
            _, negative, expert = heap[0]
            copies[expert] = count = -negative - 1
            if count > 1:
                heapq.heapreplace(heap, (load[expert] / (count - 1), -count, expert))
            else:
                heapq.heappop(heap)
    return copies


class _Packing:
    """An assignment, possibly incomplete, of the copies of one layer's experts to ranks."""

    def __init__(
        self, load: list[float], copies: list[int], num_slots: int, held: list[set[int]]
    ) -> None:
        """Start without assigned copies.

        Args:
            load: tokens by expert.
            copies: number of copies by expert.
            num_slots: number of slots of each rank.
            held: experts that each rank has in the previous placement.
        """
        #: Load of one copy, by expert.
        self.weights = [tokens / count for tokens, count in zip(load, copies, strict=True)]
        self.num_slots = num_slots
        self.held = held
        self.ranks: list[set[int]] = [set() for _ in held]
        self.rank_loads = [0.0] * len(held)
        #: Unassigned copies, by expert.
        self.unassigned = list(copies)
        self.lower_bound = max(sum(load) / len(held), max(self.weights))

    @property
    def layer(self) -> Layer:
        return [sorted(experts) for experts in self.ranks]

    def keep(self) -> None:
        """Assign to each rank its experts in `held`, as far as slots and copies allow."""
        kept = [sorted(experts, key=self._heaviest_first) for experts in self.held]
        surplus = [-count for count in self.unassigned]
        for expert in itertools.chain(*kept):
            surplus[expert] += 1
        load = [sum(self.weights[expert] for expert in experts) for experts in self.held]
        heavy_first = sorted(range(len(self.held)), key=lambda rank: (-load[rank], rank))
        # Surplus copies are dropped first by ranks with more experts than slots, then by all ranks.
        # Heavier ranks come first.
        for least in (self.num_slots, 0):
            for rank in heavy_first:
                for expert in kept[rank][:]:
                    if surplus[expert] <= 0 or len(kept[rank]) <= least:
                        continue
                    surplus[expert] -= 1
                    kept[rank].remove(expert)
        for rank, experts in enumerate(kept):
            room, num_experts = min(self.num_slots, len(experts)), len(experts)
            for index, expert in enumerate(experts):
                # If not all experts fit, keep an even selection of heavy and light experts.
                if (index + 1) * room // num_experts > index * room // num_experts:
                    self._add(expert, rank)

    def pack(self) -> None:
        """Assign all unassigned copies, so that all ranks are full."""
        order = [expert for expert, count in enumerate(self.unassigned) for _ in range(count)]
        order.sort(key=self._heaviest_first)
        free = [
            (self.rank_loads[rank], rank) for rank in range(len(self.ranks)) if self._has_room(rank)
        ]
        heapq.heapify(free)
        for expert in order:
            passed = []
            while free and expert in self.ranks[free[0][1]]:
                passed.append(heapq.heappop(free))
            if free:
                rank = heapq.heappop(free)[1]
            else:
                rank = passed.pop(0)[1]
                expert = self._make_way(expert, rank)
            self._add(expert, rank)
            for item in passed:
                heapq.heappush(free, item)
            if self._has_room(rank):
                heapq.heappush(free, (self.rank_loads[rank], rank))

    def refine(self, load_limit: float) -> None:
        """Swap copies while the heaviest rank's load is above `load_limit` and a swap helps.

        `_best_swap` describes which swaps help.

        Args:
            load_limit: load up to which a rank counts as balanced, in tokens.
        """
        while True:
            lightest_first = sorted(
                range(len(self.ranks)), key=lambda rank: (self.rank_loads[rank], rank)
            )
            heavy = lightest_first.pop()
            if self.rank_loads[heavy] <= load_limit:
                return
            for light in lightest_first:
                swap = self._best_swap(heavy, light, load_limit)
                if swap is not None:
                    break
            else:
                return
            there, back = swap
            self._remove(there, heavy)
            self._remove(back, light)
            self._add(there, light)
            self._add(back, heavy)

    def _best_swap(self, heavy: int, light: int, load_limit: float) -> tuple[int, int] | None:
        """Return the best swap of experts between `heavy` and `light`, or None if no swap helps.

        A swap helps if afterwards both ranks have less load than `heavy` has now. Of the swaps
        after which both loads are at most `load_limit`, the best one leaves the fewest experts on
        ranks that do not hold them yet. If there is no such swap, the best one has the lowest
        maximum of both loads.

        Returns:
            (expert that leaves `heavy`, expert that leaves `light`).
        """
        high, low = self.rank_loads[heavy], self.rank_loads[light]
        best = None
        # Ignore gains from rounding.
        lightest = (high * (1 - 1e-9), 0, 0.0, 0, 0)
        for there in sorted(self.ranks[heavy] - self.ranks[light]):
            for back in sorted(self.ranks[light] - self.ranks[heavy]):
                gain = self.weights[there] - self.weights[back]
                if gain <= 0:
                    continue
                load = max(high - gain, low + gain)
                moves = (there not in self.held[light]) + (back not in self.held[heavy])
                moves -= (there not in self.held[heavy]) + (back not in self.held[light])
                candidate = (max(load, load_limit), moves, load, there, back)
                if load < high * (1 - 1e-9) and (best is None or candidate < lightest):
                    best, lightest = (there, back), candidate
        return best

    def _make_way(self, expert: int, rank: int) -> int:
        """Put `expert` on a full rank in place of another expert, and return the replaced expert.

        Call this method if every rank with a free slot already holds `expert`. `rank` is one of the
        ranks with a free slot. It can take the returned expert, which it does not hold yet.
        """
        # A choice always exists. At least one full rank lacks `expert`, and so holds num_slots
        # other experts. `rank` has a free slot and holds `expert`, and so holds at most
        # num_slots - 2 other experts.
        # Prefer experts that `full` did not hold before. They move anyway.
        choices = (
            (
                other in self.held[full],
                self.rank_loads[full] + self.weights[expert] - self.weights[other],
                full,
                other,
            )
            for full in range(len(self.ranks))
            if expert not in self.ranks[full]
            for other in sorted(self.ranks[full] - self.ranks[rank])
        )
        *_, full, other = min(choices)
        self._remove(other, full)
        self._add(expert, full)
        return other

    def _add(self, expert: int, rank: int) -> None:
        self.ranks[rank].add(expert)
        self.rank_loads[rank] += self.weights[expert]
        self.unassigned[expert] -= 1

    def _remove(self, expert: int, rank: int) -> None:
        self.ranks[rank].remove(expert)
        self.rank_loads[rank] -= self.weights[expert]
        self.unassigned[expert] += 1

    def _has_room(self, rank: int) -> bool:
        return len(self.ranks[rank]) < self.num_slots

    def _heaviest_first(self, expert: int) -> tuple[float, int]:
        return -self.weights[expert], expert


def fill_slots(experts: list[int], before: tuple[int, ...]) -> tuple[int, ...]:
    """Return the experts of one rank in the order of the rank's slots.

    An expert that is also in `before` keeps its slot, if the rank still has that slot. The
    other experts fill the free slots.

    Args:
        experts: experts of the rank, one per slot, in any order.
        before: previous expert of each slot.
    """
    slots: list[int | None] = [None] * len(experts)
    others = list(experts)
    for slot, expert in enumerate(before[: len(experts)]):
        if expert in others:
            slots[slot] = expert
            others.remove(expert)
    following = iter(others)
    return tuple(next(following) if expert is None else expert for expert in slots)
