"""Computes placements by the experts' reported loads, and decides when to rebalance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from baton_engine.elastic.coordinator.expert_placement import TOLERANCE, imbalance, plan_placement
from baton_engine.elastic.coordinator.roster import Roster, key_of
from baton_protocol.topology import ExpertLoads, Generation, Member, Placement

#: An automatic rebalance must reduce the imbalance to less than this fraction of the measured one.
WORTHWHILE = 0.95

#: [sparse layer][expert]: tokens.
Loads = list[list[int]]


def summed_loads(reports: Iterable[ExpertLoads | None]) -> Loads:
    """Return the loads summed over all ranks, or an empty list if no rank has a report."""
    total: Loads = []
    for report in reports:
        if report is None:
            continue
        if not total:
            total = [[0] * len(layer) for layer in report.tokens]
        for sums, layer in zip(total, report.tokens, strict=True):
            for expert, tokens in enumerate(layer):
                sums[expert] += tokens
    return total


class Balance:
    """Computes placements from the loads that ranks report."""

    def __init__(self, roster: Roster, threshold: float, window_s: float) -> None:
        """Start without measured loads.

        Args:
            roster: Source of the reports.
            threshold: Imbalance above which experts are moved. 0 disables automatic rebalancing.
            window_s: Seconds over which the imbalance is measured.
        """
        self._roster = roster
        self._threshold = threshold
        self._window_s = window_s
        # The current window: nonce of its generation, its start, and the loads at its start.
        self._nonce = ""
        self._since = 0.0
        self._start: Loads = []

    def place(
        self, members: tuple[Member, ...], present: Generation | None, *, keep: bool = False
    ) -> Placement:
        """Return a placement of the experts on these members.

        Args:
            members: Ranks of the new generation.
            present: The current generation.
            keep: Leave experts where they are and place only lost copies, because the group waits
                for this placement. The next placement restores balance and redundant copies.

        Raises:
            ValueError: No such placement exists.
        """
        statuses = [self._roster.living[member.instance_id] for member in members]
        num_experts = statuses[0].num_experts
        num_redundant = max(status.num_redundant_experts for status in statuses)
        if keep and present is not None:
            fewest = -(-num_experts // len(members))
            held = max((len(slots) for layer in present.placement for slots in layer), default=0)
            num_redundant = min(
                num_redundant, max(0, max(fewest, held) * len(members) - num_experts)
            )
        return plan_placement(
            statuses[0].num_sparse_layers,
            num_experts,
            [member.instance_id for member in members],
            num_redundant,
            None if present is None else self._loads(present) or None,
            experts_of(present),
            math.inf if keep else TOLERANCE,
        )

    def is_worthwhile(self, present: Generation, now: float) -> bool:
        """Return whether a measuring window ends now, and its imbalance calls for a rebalance.

        The window's imbalance must exceed the threshold. The imbalance of a new placement must be
        less than WORTHWHILE times the window's imbalance.
        """
        if not self._threshold:
            return False
        loads = self._window(present, now)
        found = _mean(imbalance(present.placement, loads)) if loads else 0.0
        if found <= self._threshold:
            return False
        return _mean(imbalance(self.place(present.members, present), loads)) < WORTHWHILE * found

    def _loads(self, present: Generation) -> Loads:
        """Return the tokens of each expert since the start of the generation."""
        key = key_of(present)
        return summed_loads(
            status.loads for status, own in self._roster.serving() if key_of(own) == key
        )

    def _window(self, present: Generation, now: float) -> Loads:
        """Return the loads of the window that ends now, or an empty list if no window ends.

        If a window ends, the next window starts.
        """
        same = present.nonce == self._nonce and bool(self._start)
        if same and now - self._since < self._window_s:
            return []
        loads, start = self._loads(present), self._start if same else []
        self._nonce, self._since, self._start = present.nonce, now, loads
        if not start or not loads:
            return []
        return [
            [max(0, after - before) for after, before in zip(*layers, strict=True)]
            for layers in zip(loads, start, strict=True)
        ]


def experts_of(generation: Generation | None) -> tuple[Placement, Sequence[str]] | None:
    """Return a generation's placement and the instance ids of its ranks.

    Return None if `generation` is None. `plan_placement` takes the result as `previous`.
    """
    if generation is None:
        return None
    return generation.placement, [member.instance_id for member in generation.members]


def _mean(ratios: list[float]) -> float:
    return sum(ratios) / len(ratios)
