"""Computes placements from the reported loads of the experts, and decides when to rebalance."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from itertools import chain

from baton_engine.bounded_log import SparseLog
from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.operation import Rebalancing
from baton_engine.elastic.coordinator.placement.expert_placement import (
    TOLERANCE,
    count_moves,
    imbalance,
    plan_placement,
)
from baton_engine.elastic.coordinator.placement.rebalance_steps import first_moves
from baton_engine.elastic.coordinator.roster import Roster, key_of
from baton_protocol.topology import ExpertLoads, Generation, Placement, Status, TopologyMember

logger = logging.getLogger(__name__)

#: Experts are rebalanced only if the imbalance of the new placement is less than this fraction of
#: the measured imbalance.
WORTHWHILE = 0.95
#: Minimum number of expert choices per rank and layer in a window. A token that is sent to k
#: experts counts as k choices. With fewer choices, chance alone makes the loads of ranks differ by
#: more than about 1%.
MIN_CHOICES = 10_000

#: [sparse layer][expert]: tokens.
Loads = list[list[int]]


def summed_loads(reports: Iterable[ExpertLoads | None]) -> Loads:
    """Return the loads summed over all reports, or an empty list if there is no report."""
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
    """Computes placements from the loads that ranks report, and decides when to rebalance."""

    def __init__(self, roster: Roster, config: ControllerConfig) -> None:
        """Start without measured loads.

        Args:
            roster: source of the reports.
            config: threshold and limits of automatic rebalancing.
        """
        self._roster = roster
        self._config = config
        #: Imbalance of the last window: the heaviest rank's load divided by the mean load, averaged
        #: over the layers. 0: not measured.
        self.imbalance = 0.0
        # The current window: nonce of its generation, its earliest end, and the loads at its start.
        self._nonce = ""
        self._end = 0.0
        self._start: Loads = []
        self._has_warned_of_limit = False
        self._log = SparseLog(logger)

    def place(
        self,
        members: tuple[TopologyMember, ...],
        present: Generation | None,
        *,
        keep: bool = False,
        loads: Loads | None = None,
    ) -> Placement:
        """Return a placement of the experts on these members.

        Args:
            members: ranks of the new generation.
            present: the current generation.
            keep: True if the group serves no requests until the placement takes effect. Experts
                then do not move for balance, and there may be fewer redundant copies. A later
                placement without `keep` restores the balance and the redundant copies.
            loads: loads of the experts. None: the loads since the start of `present`.

        Raises:
            ValueError: no such placement exists.
        """
        statuses = self._statuses(members)
        if loads is None and present is not None:
            loads = self._loads(present)
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
            loads or None,
            experts_of(present),
            math.inf if keep else TOLERANCE,
        )

    def expert_bytes(self, members: Iterable[TopologyMember]) -> int:
        """Return the size of one expert in bytes, or 0 if a member does not report the size."""
        return min(status.expert_bytes for status in self._statuses(members))

    def due(self, present: Generation, now: float) -> Rebalancing | None:
        """Return the rebalance that is due because a measuring window ends now, or None.

        A rebalance is due if the window's imbalance exceeds the threshold, and a new placement has
        less than WORTHWHILE times that imbalance. No rebalance is due if the limit of moved bytes
        allows no move.
        """
        loads = self._window(present, now)
        if not loads:
            return None
        found = self.imbalance = _mean(imbalance(present.placement, loads))
        if not self._config.rebalance_threshold or found <= self._config.rebalance_threshold:
            return None
        try:
            placement = self.place(present.members, present, loads=loads)
        except ValueError as error:  # the members' statuses contradict each other
            self._log.warning("experts are not rebalanced in this measuring window: %s", error)
            return None
        if _mean(imbalance(placement, loads)) >= WORTHWHILE * found:
            return None
        placement = self._within_limit(placement, present, loads)
        if placement == present.placement:
            return None
        return Rebalancing(placement, found, _mean(imbalance(placement, loads)))

    def _within_limit(self, placement: Placement, present: Generation, loads: Loads) -> Placement:
        """Return a placement whose moves do not exceed `rebalance_max_move_bytes`. 0: no limit.

        The result is `placement` if its moves are within the limit. Otherwise, moves are applied to
        the present placement up to the limit, first those that reduce the imbalance most. If the
        size of an expert is unknown, no expert moves.
        """
        limit = self._config.rebalance_max_move_bytes
        if not limit:
            return placement
        expert_bytes = self.expert_bytes(present.members)
        if not expert_bytes:
            logger.warning(
                "experts are not rebalanced, because a rank of an older version does not report "
                "the size of an expert; update all ranks to the coordinator's version"
            )
            return present.placement
        if limit < 2 * expert_bytes and not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            logger.warning(
                "ranks cannot exchange experts to balance their load, because "
                "--rebalance-max-move-bytes=%d is less than two experts of %d bytes; raise "
                "decode.parallelism.rebalance.maxMoveMemory to at least %d",
                limit,
                expert_bytes,
                2 * expert_bytes,
            )
        max_moves = int(limit // expert_bytes)
        ids = [member.instance_id for member in present.members]
        if count_moves((present.placement, ids), (placement, ids)) <= max_moves:
            return placement
        return first_moves(present.placement, loads, max_moves)

    def _statuses(self, members: Iterable[TopologyMember]) -> list[Status]:
        return [self._roster.living[member.instance_id] for member in members]

    def _loads(self, present: Generation) -> Loads:
        """Return the tokens of each expert since the start of `present`, summed over its ranks.

        Reports that do not fit the placement are left out. The list is empty if no report is left.
        """
        key = key_of(present)
        experts = set(chain.from_iterable(chain.from_iterable(present.placement)))
        shape = [len(experts)] * len(present.placement)
        if experts != set(range(len(experts))):
            return []
        return summed_loads(
            status.loads
            for status, own in self._roster.serving()
            if key_of(own) == key and status.loads is not None and fits(status.loads, shape)
        )

    def _window(self, present: Generation, now: float) -> Loads:
        """Return the loads of the measuring window that ends now. Empty if no window ends now.

        If a window ends, the next window starts. A window with fewer than MIN_CHOICES choices of an
        expert per rank and layer is extended.
        """
        same = present.nonce == self._nonce and bool(self._start)
        if same and now < self._end:
            return []
        self._nonce, self._end = present.nonce, now + self._config.rebalance_window_s
        loads, start = self._loads(present), self._start
        if not same or list(map(len, loads)) != list(map(len, start)):
            self._start = loads
            return []
        window = [
            [max(0, after - before) for after, before in zip(*layers, strict=True)]
            for layers in zip(loads, start, strict=True)
        ]
        if sum(map(sum, window)) < MIN_CHOICES * present.size * len(window):
            return []
        self._start = loads
        return window


def experts_of(generation: Generation | None) -> tuple[Placement, Sequence[str]] | None:
    """Return (placement, instance ids of the ranks) of a generation. None without a generation.

    `plan_placement` takes this pair as `previous`.
    """
    if generation is None:
        return None
    return generation.placement, [member.instance_id for member in generation.members]


def fits(loads: ExpertLoads, shape: list[int]) -> bool:
    """Return whether a report of loads has this shape and no negative number of tokens.

    Args:
        loads: the report.
        shape: number of experts in each sparse layer.
    """
    return list(map(len, loads.tokens)) == shape and all(
        min(layer, default=0) >= 0 for layer in loads.tokens
    )


def _mean(ratios: list[float]) -> float:
    return sum(ratios) / len(ratios)
