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

from baton_engine.scheduling.decisions import Finished, Preempted, SwappedIn, SwappedOut
from baton_engine.scheduling.queues import by_order
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.state import SchedulerState
from baton_protocol.messages import ErrorCode, FinishReason


@dataclass(slots=True)
class Preemptor:
    """Selects the requests that lose their memory, and those that get it back."""

    state: SchedulerState

    def preempt_for(self, request: Request) -> Preempted | SwappedOut | Finished | None:
        """Decide which request loses its memory so that `request`, which runs, can continue.

        The request that was accepted last loses its memory first. Before `request` loses its own,
        later requests do that have loaded their KV and do not run. If `request` is a beam search
        that holds all memory, it ends.

        Returns:
            None if `request` must wait until earlier ones end.
        """
        victim = self._last_running(request)
        if victim is None or victim is request:
            # A loaded request holds memory without running. It waits for a place among the running
            # requests, and `request`, which has one, would wait for that memory.
            loaded = max(self.state.queues.loaded, key=by_order, default=None)
            if loaded is not None and loaded.order > request.order:
                return Preempted(loaded)
        if victim is None:
            return None
        if victim is request and request.beams is not None and self._holds_all_memory(request):
            return self._out_of_memory(request)
        return self._preempt(victim, beneficiary=request)

    def resume(self) -> Iterator[SwappedIn]:
        """Resume swapped requests, in order, while there are places and memory.

        The caller applies each decision before it takes the next one.
        """
        while (unit := self.state.swapped.first()) is not None:
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            in_flight = any(sequence.num_in_flight for sequence in sequences)
            if in_flight or not self.state.running.has_places(num_seqs):
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

    def _last_running(self, first: Request) -> Request | None:
        """Return the last running request that may lose its blocks, from `first` on.

        Earlier requests are in the step already. PRODUCE requests are skipped: a peer may read
        their blocks at any time.
        """
        for request in reversed(self.state.running.in_order):
            if not request.produces:
                return request
            if request is first:
                break
        return None

    def _preempt(self, victim: Request, *, beneficiary: Request) -> Preempted | SwappedOut:
        """Take the blocks of `victim`.

        With swapping, its whole group is swapped unless `beneficiary` belongs to it.
        """
        group = victim.group
        if group is None or group is not beneficiary.group:
            in_order = self.state.running.in_order
            members = (
                [victim] if group is None else [other for other in in_order if other.group is group]
            )
            if self._wants_swap(members):
                copies = self.state.kv.swap_out(
                    [sequence for member in members for sequence in member.sequences]
                )
                if copies is not None:
                    return SwappedOut(members, copies)
        return Preempted(victim)

    def _wants_swap(self, members: list[Request]) -> bool:
        mode = self.state.config.preemption_mode
        if mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return mode == "swap"

    def _holds_all_memory(self, search: Request) -> bool:
        """Return whether all other blocks are free already."""
        own = {block.block_id for beam in search.sequences for block in beam.blocks}
        return len(own) + self.state.kv.num_free_blocks == self.state.kv.pool.num_blocks

    def _out_of_memory(self, search: Request) -> Finished:
        message = (
            f"beam_width={search.sampling_params.beam_width} has used up all "
            f"{self.state.kv.pool.num_blocks} KV blocks; "
            "use fewer beams, fewer tokens or an engine with more KV memory"
        )
        return Finished.without_token(search, FinishReason.LENGTH, ErrorCode.LENGTH, message)
