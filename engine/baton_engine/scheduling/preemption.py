"""Preemption: decides which request loses its memory, and which swapped request gets it back.

The last request in order loses first. Two modes (Kwon et al. 2023, PagedAttention, section 4.5):

- recompute: its blocks are freed, and it queues again with the tokens it has.
- swap: its blocks move to host memory. Running samples of one prompt share blocks, so they are
  swapped together, and so are the beams of a search. Swapped requests are resumed before new ones
  are admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton_engine.scheduling.decisions import Preempted, SwappedIn, SwappedOut
from baton_engine.scheduling.queues import by_order
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.state import SchedulerState


@dataclass(slots=True)
class Preemptor:
    """Selects the requests that lose their memory, and those that get it back."""

    state: SchedulerState

    def find_victim(self, index: int) -> Request | None:
        """Return the last running request that may lose its blocks, from place `index` on.

        Earlier requests are in the step already. PRODUCE requests are skipped: a peer may read
        their blocks at any time.
        """
        in_order = self.state.running.in_order
        for position in range(len(in_order) - 1, index - 1, -1):
            if not in_order[position].produces:
                return in_order[position]
        return None

    def find_loaded_victim(self, beneficiary: Request) -> Request | None:
        """Return the last loaded request if it comes after `beneficiary`.

        A loaded request holds memory without running. If it waited for the place of `beneficiary`,
        neither could continue.
        """
        victim = max(self.state.queues.loaded, key=by_order, default=None)
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
                copies = self.state.kv.swap_out(
                    [sequence for member in members for sequence in member.sequences]
                )
                if copies is not None:
                    return SwappedOut(members, copies)
        return Preempted(victim)

    def resume(self) -> Iterator[SwappedIn]:
        """Resume swapped requests, in order, while there are places and memory.

        The caller applies each decision before it takes the next one.
        """
        while (unit := self.state.swapped.first()) is not None:
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            if any(sequence.num_in_flight for sequence in sequences):
                return
            if not self.state.running.has_places(num_seqs):
                return
            # Without room to grow, they would be swapped out again in the next step. This is true
            # even if they run alone, because transfers also hold memory.
            if len(self.state.running):
                keep_free = self.state.kv.watermark_blocks + num_seqs
            else:
                num_blocks = len(
                    {block.block_id for sequence in sequences for block in sequence.swapped_blocks}
                )
                keep_free = min(num_seqs, self.state.kv.pool.num_blocks - num_blocks)
            copies = self.state.kv.swap_in(sequences, keep_free=keep_free)
            if copies is None:
                return
            yield SwappedIn(unit, copies)

    def _wants_swap(self, members: list[Request]) -> bool:
        mode = self.state.config.preemption_mode
        if mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return mode == "swap"
