"""Preemption: decides which request loses its memory, and which swapped request gets it back.

The last request in order loses first. Two modes (Kwon et al. 2023, PagedAttention, section 4.5):

- recompute: its blocks are freed, and it queues again with the tokens it has.
- swap: its blocks move to host memory. Running samples of one prompt share blocks, so they are
  swapped together, and so are the beams of a search. Swapped requests are resumed before new ones
  are admitted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from baton_engine.scheduling.decisions import Preempted, SwappedIn, SwappedOut
from baton_engine.scheduling.queues import by_order
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.state import SchedulerState


class Preemptor:
    """Selects victims, and keeps the swapped requests in order."""

    def __init__(self, state: SchedulerState) -> None:
        self._kv = state.kv
        self._running = state.running
        self._loaded = state.queues.loaded
        can_swap = self._kv.swap_pool.num_blocks > 0
        self._mode = state.config.preemption_mode if can_swap else "recompute"
        #: Units of requests that were swapped out together, in order. No unit is empty.
        self.swapped: list[list[Request]] = []

    @property
    def num_swapped(self) -> int:
        return sum(map(len, self.swapped))

    def find_victim(self, index: int) -> Request | None:
        """Return the last running request that may lose its blocks, from place `index` on.

        Earlier requests are in the step already. PRODUCE requests are skipped: a peer may read
        their blocks at any time.
        """
        in_order = self._running.in_order
        for position in range(len(in_order) - 1, index - 1, -1):
            if not in_order[position].produces:
                return in_order[position]
        return None

    def find_loaded_victim(self, beneficiary: Request) -> Request | None:
        """Return the last loaded request if it comes after `beneficiary`.

        A loaded request holds memory without running. If it waited for the place of `beneficiary`,
        neither could continue.
        """
        victim = max(self._loaded, key=by_order, default=None)
        return victim if victim is not None and victim.order > beneficiary.order else None

    def preempt(self, victim: Request, *, beneficiary: Request) -> Preempted | SwappedOut:
        """Take the blocks of `victim`.

        With swapping, its whole group is swapped unless `beneficiary` belongs to it.
        """
        if victim.group is None or victim.group is not beneficiary.group:
            members = [victim]
            if victim.group is not None:
                members = sorted(
                    (
                        member
                        for member in victim.group.members.values()
                        if member.status is RequestStatus.RUNNING
                    ),
                    key=by_order,
                )
            if self._wants_swap(members):
                copies = self._kv.swap_out(
                    [sequence for member in members for sequence in member.sequences]
                )
                if copies is not None:
                    bisect.insort(self.swapped, members, key=lambda unit: unit[0].order)
                    return SwappedOut(members, copies)
        return Preempted(victim)

    def take_swapped(self) -> list[Request]:
        """Remove and return all swapped requests."""
        units, self.swapped = self.swapped, []
        return [request for unit in units for request in unit]

    def discard(self, request: Request) -> None:
        """Drop a request that has ended."""
        for unit in self.swapped:
            if request in unit:
                unit.remove(request)
                if not unit:
                    self.swapped.remove(unit)
                return

    def resume(self) -> Iterator[SwappedIn]:
        """Resume swapped requests, in order, while there are places and memory.

        The caller applies each decision before it takes the next one.
        """
        while self.swapped:
            unit = self.swapped[0]
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            if any(sequence.num_in_flight for sequence in sequences):
                return
            if not self._running.has_places(num_seqs):
                return
            # Without room to grow they would be swapped out next, even if they run alone, because
            # transfers also hold memory.
            if len(self._running):
                keep_free = self._kv.watermark_blocks + num_seqs
            else:
                num_blocks = len(
                    {block.block_id for sequence in sequences for block in sequence.swapped_blocks}
                )
                keep_free = min(num_seqs, self._kv.pool.num_blocks - num_blocks)
            copies = self._kv.swap_in(sequences, keep_free=keep_free)
            if copies is None:
                return
            del self.swapped[0]
            yield SwappedIn(unit, copies)

    def _wants_swap(self, members: list[Request]) -> bool:
        if self._mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return self._mode == "swap"
