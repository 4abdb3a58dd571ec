"""Which rank holds which experts: balanced by load, redundant copies for the busiest, little moved from what was before. Pure.

Per sparse layer, in the manner of EPLB (DeepSeek-AI, "Expert Parallelism Load Balancer", 2025):

    replicate   each slot beyond one per expert goes to the expert with the highest load per copy
    pack        copies, heaviest first, each to the lightest rank with a free slot (longest processing time first)
    refine      while it helps, the heaviest and the lightest rank swap one copy for another

A rank never holds two copies of one expert, unless it has more slots than there are experts. `refine` bounds the result: where no
swap helps, heaviest - lightest <= w, the largest load of one copy, because two ranks with equally many slots that differ by more
have a pair of copies (a, b) with 0 < a - b <= w, and swapping those makes the heavier of both lighter. So

    heaviest rank <= mean + w <= 2 * max(mean, w)       and no packing of these copies has a heaviest rank below max(mean, w)

With a previous placement survivors keep what they hold, and only what is missing or too much is packed. Its heaviest rank may be
heavier than in a placement from nothing, by the tolerance; if swaps do not get there, balance counts more than moves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from baton_protocol.topology import Placement

TOLERANCE = 0.05
FINE = 0.01
"""So close to the lower bound nothing is swapped any more."""

Layer = list[list[int]]
"""[rank][slot], in any order: experts."""


def plan_placement(
    num_layers: int,
    num_experts: int,
    instance_ids: Sequence[str],
    num_redundant: int = 0,
    loads: Sequence[Sequence[int]] | None = None,
    previous: tuple[Placement, Sequence[str]] | None = None,
    tolerance: float = TOLERANCE,
) -> Placement:
    """Deterministic. Every rank gets ceil((num_experts + num_redundant) / ranks) slots.

    Args:
        instance_ids: of the ranks, in their order.
        num_redundant: slots beyond one per expert that there should be at least.
        loads: [layer][expert], tokens; None: all experts count the same.
        previous: a placement and the instance ids of its ranks.
        tolerance: how much heavier the heaviest rank may be than in a placement from nothing, for the sake of fewer moves.
            Infinite: nothing moves for balance alone, as suits a group that waits for its experts.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    num_ranks = len(instance_ids)
    if not num_ranks or num_experts < 1 or num_redundant < 0 or len(set(instance_ids)) != num_ranks:
        raise ValueError(
            f"no placement of {num_experts} experts, {num_redundant} redundant ones, over ranks {list(instance_ids)}"
        )
    if loads is not None and [len(layer) for layer in loads] != [num_experts] * num_layers:
        raise ValueError(f"loads are not of {num_layers} layers with {num_experts} experts")
    if previous is not None and len(previous[0]) != num_layers:
        raise ValueError(
            f"the previous placement is of {len(previous[0])} layers, not of {num_layers}"
        )
    num_slots = -(-(num_experts + num_redundant) // num_ranks)
    placement = []
    for index in range(num_layers):
        load = [float(tokens) for tokens in loads[index]] if loads is not None else []
        if not any(load):
            load = [1.0] * num_experts
        before: list[tuple[int, ...]] = [()] * num_ranks
        if previous is not None:
            held = dict(zip(previous[1], previous[0][index], strict=True))
            if any(expert >= num_experts for slots in held.values() for expert in slots):
                raise ValueError(f"the previous placement is of more than {num_experts} experts")
            before = [held.get(instance_id, ()) for instance_id in instance_ids]
        layer = _plan_layer(load, num_ranks, min(num_slots, num_experts), before, tolerance)
        surplus = [expert % num_experts for expert in range(num_slots - len(layer[0]))]
        placement.append(
            tuple(
                _in_slots(experts + surplus, slots)
                for experts, slots in zip(layer, before, strict=True)
            )
        )
    return tuple(placement)


def count_moves(
    previous: tuple[Placement, Sequence[str]], following: tuple[Placement, Sequence[str]]
) -> int:
    """Experts, over all layers, that a rank of `following` gets and did not hold before."""
    moves = 0
    for old_layer, new_layer in zip(previous[0], following[0], strict=True):
        held = dict(zip(previous[1], old_layer, strict=True))
        for instance_id, slots in zip(following[1], new_layer, strict=True):
            moves += len(set(slots) - set(held.get(instance_id, ())))
    return moves


def imbalance(placement: Placement, loads: Sequence[Sequence[int]]) -> list[float]:
    """Per layer: the heaviest rank's load over the mean, if an expert's tokens are divided evenly over its copies. 1.0: balanced,
    or no tokens."""
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
    good_enough = (1 + tolerance) * max(fresh.rank_loads)
    num_held = [sum(expert in experts for experts in held) for expert in range(len(load))]
    for wanted in (_replicate(load, num_ranks, num_slots, num_held), copies):
        packing = _Packing(load, wanted, num_slots, held)
        packing.keep()
        packing.pack()
        packing.refine(good_enough)
        if max(packing.rank_loads) <= good_enough:
            return packing.layer
    return _where_most_is_held(fresh.layer, held)


def _where_most_is_held(layer: Layer, held: list[set[int]]) -> Layer:
    """The ranks' parts of a layer change places, so that few experts move."""
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
    """Copies per expert, 1 to num_ranks each, that fill all slots: those there are `at_first`, and added or taken away where the
    load per copy is the highest, or stays the lowest."""
    copies = [min(max(count, 1), num_ranks) for count in at_first]
    missing = num_ranks * num_slots - sum(copies)
    if missing > 0:
        heap = [
            (-load[expert] / count, count, expert)
            for expert, count in enumerate(copies)
            if count < num_ranks
        ]
        heapq.heapify(heap)
        for _ in range(missing):
            _, count, expert = heap[0]
            copies[expert] = count + 1
            if count + 1 < num_ranks:
                heapq.heapreplace(heap, (-load[expert] / (count + 1), count + 1, expert))
            else:
                heapq.heappop(heap)
    elif missing < 0:
        heap = [
            (load[expert] / (count - 1), -count, expert)
            for expert, count in enumerate(copies)
            if count > 1
        ]
        heapq.heapify(heap)
        for _ in range(-missing):
            _, negative, expert = heap[0]
            copies[expert] = count = -negative - 1
            if count > 1:
                heapq.heapreplace(heap, (load[expert] / (count - 1), -count, expert))
            else:
                heapq.heappop(heap)
    return copies


class _Packing:
    """One layer's copies on their way to ranks."""

    def __init__(
        self, load: list[float], copies: list[int], num_slots: int, held: list[set[int]]
    ) -> None:
        """`held`: what each rank held before."""
        self.weights = [tokens / count for tokens, count in zip(load, copies, strict=True)]
        """Load of one copy, by expert."""
        self.num_slots = num_slots
        self.held = held
        self.ranks: list[set[int]] = [set() for _ in held]
        self.rank_loads = [0.0] * len(held)
        self.missing = list(copies)
        """Copies without a rank, by expert."""
        self.lower_bound = max(sum(load) / len(held), max(self.weights))

    @property
    def layer(self) -> Layer:
        return [sorted(experts) for experts in self.ranks]

    def keep(self) -> None:
        """Ranks keep what they held, as far as there is room for it and so many copies are wanted."""
        kept = [sorted(experts, key=self._heaviest_first) for experts in self.held]
        surplus = [-count for count in self.missing]
        for expert in itertools.chain(*kept):
            surplus[expert] += 1
        load = [sum(self.weights[expert] for expert in experts) for experts in self.held]
        heavy_first = sorted(range(len(self.held)), key=lambda rank: (-load[rank], rank))
        # What there is too much of is given up by those who have no room for all, then by the heavier ones.
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
                # If not all fit, those that stay are spread evenly over heavy and light ones.
                if (index + 1) * room // num_experts > index * room // num_experts:
                    self._put(expert, rank)

    def pack(self) -> None:
        """Gives all missing copies to ranks, which are full then."""
        order = [expert for expert, count in enumerate(self.missing) for _ in range(count)]
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
            self._put(expert, rank)
            for item in passed:
                heapq.heappush(free, item)
            if self._has_room(rank):
                heapq.heappush(free, (self.rank_loads[rank], rank))

    def refine(self, good_enough: float) -> None:
        """Swaps until the heaviest rank's load is `good_enough`, or no swap with any rank makes it lighter."""
        while True:
            lightest_first = sorted(
                range(len(self.ranks)), key=lambda rank: (self.rank_loads[rank], rank)
            )
            heavy = lightest_first.pop()
            if self.rank_loads[heavy] <= good_enough:
                return
            for light in lightest_first:
                swap = self._best_swap(heavy, light, good_enough)
                if swap is not None:
                    break
            else:
                return
            there, back = swap
            self._take(there, heavy)
            self._take(back, light)
            self._put(there, light)
            self._put(back, heavy)

    def _best_swap(self, heavy: int, light: int, good_enough: float) -> tuple[int, int] | None:
        """Of those that are good enough the one that moves least; if none is, the one that makes the heavier of both lightest."""
        high, low = self.rank_loads[heavy], self.rank_loads[light]
        best = None
        # What rounding leaves is no gain.
        lightest = (high * (1 - 1e-9), 0, 0.0, 0, 0)
        for there in sorted(self.ranks[heavy] - self.ranks[light]):
            for back in sorted(self.ranks[light] - self.ranks[heavy]):
                gain = self.weights[there] - self.weights[back]
                if gain <= 0:
                    continue
                load = max(high - gain, low + gain)
                moves = (there not in self.held[light]) + (back not in self.held[heavy])
                moves -= (there not in self.held[heavy]) + (back not in self.held[light])
                candidate = (max(load, good_enough), moves, load, there, back)
                if load < high * (1 - 1e-9) and (best is None or candidate < lightest):
                    best, lightest = (there, back), candidate
        return best

    def _make_way(self, expert: int, rank: int) -> int:
        """Only ranks that hold `expert` have room, `rank` among them: a full one takes it and gives up what `rank` can take.

        There is such a one: not all ranks hold the expert, for a copy is left over; and that one holds num_slots others, of which
        `rank` holds num_slots - 2 at most.
        """
        choices = (  # an expert that `full` did not hold before arrives anyway: elsewhere it costs no further move
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
        self._take(other, full)
        self._put(expert, full)
        return other

    def _put(self, expert: int, rank: int) -> None:
        self.ranks[rank].add(expert)
        self.rank_loads[rank] += self.weights[expert]
        self.missing[expert] -= 1

    def _take(self, expert: int, rank: int) -> None:
        self.ranks[rank].remove(expert)
        self.rank_loads[rank] -= self.weights[expert]
        self.missing[expert] += 1

    def _has_room(self, rank: int) -> bool:
        return len(self.ranks[rank]) < self.num_slots

    def _heaviest_first(self, expert: int) -> tuple[float, int]:
        return -self.weights[expert], expert


def _in_slots(experts: list[int], before: tuple[int, ...]) -> tuple[int, ...]:
    """Each in the slot where it was, the others in those that are left."""
    slots: list[int | None] = [None] * len(experts)
    others = list(experts)
    for slot, expert in enumerate(before[: len(experts)]):
        if expert in others:
            slots[slot] = expert
            others.remove(expert)
    following = iter(others)
    return tuple(next(following) if expert is None else expert for expert in slots)
