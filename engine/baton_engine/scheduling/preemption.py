"""Preemption: decides which request loses its KV blocks, and which swapped request is resumed.

The last request in order, (priority, arrival), is preempted first. There are two modes (Kwon et al.
2023, PagedAttention, section 4.5):

- recompute: the request's blocks are freed. The request keeps its tokens and is queued again.
- swap: the request's blocks move to host memory. All running samples of one prompt are swapped
  together, because they share blocks, and so are all beams of a search. Swapped requests are
  resumed before waiting requests are admitted.
"""

from __future__ import annotations

from baton_engine.scheduling.decisions import (
    Finished,
    LazyDecisions,
    Preempted,
    SwappedIn,
    SwappedOut,
)
from baton_engine.scheduling.queues import by_order
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.engine_messages import ErrorCode, FinishReason


class Preemptor:
    """Selects the requests to preempt and the swapped requests to resume."""

    def __init__(self, state: SchedulerState) -> None:
        self.mode = state.config.preemption_mode
        self.kv = state.kv
        self.running = state.running
        self.loaded = state.queues.loaded
        self.swapped = state.swapped
        #: Blocks that stay free when swapped requests are resumed beside running requests.
        self.watermark_blocks = state.watermark_blocks

    def preempt_for(self, request: Request) -> Preempted | SwappedOut | Finished | None:
        """Return the decision that frees blocks for the running `request`.

        A request is behind `request` if its `Request.order` is larger. The first of these requests
        that exists is preempted:

        1. the last running request behind `request`
        2. the last request behind `request` that has loaded its KV and does not run yet
        3. `request` itself. If it is a beam search that holds all memory, it ends instead.

        Requests that compute KV for a peer (`Request.produces`) are never preempted.

        Returns:
            None if no request can be preempted. `request` then waits until earlier requests end.
        """
        victim = self._last_running(request)
        if victim is None or victim is request:
            # A loaded request holds memory while it waits for a place in the batch. `request` has a
            # place and would wait for the memory, so both would wait for each other.
            loaded = max(self.loaded, key=by_order, default=None)
            if loaded is not None and loaded.order > request.order:
                return Preempted(loaded)
        if victim is None:
            return None
        if victim is request and request.beams is not None and self._holds_all_memory(request):
            return self._out_of_memory(request)
        return self._preempt(victim, beneficiary=request)

    def resume(self) -> LazyDecisions[SwappedIn]:
        """Yield decisions to resume swapped requests, in the order of `SwappedRequests`.

        Stop at the first unit that has steps in flight, or for which the batch or the KV cache has
        no room.
        """
        while (unit := self.swapped.first()) is not None:
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            in_flight = any(sequence.num_in_flight for sequence in sequences)
            if in_flight or not self.running.has_places(num_seqs):
                return
            # Without room to grow, these requests would be swapped out again in the next step. They
            # need room even if no other request runs, because transfers also hold memory.
            if len(self.running):
                keep_free = self.watermark_blocks + num_seqs
            else:
                num_blocks = len(
                    {block.block_id for sequence in sequences for block in sequence.swapped_blocks}
                )
                keep_free = min(num_seqs, self.kv.pool.num_blocks - num_blocks)
            if not self.kv.can_swap_in(sequences, keep_free=keep_free):
                return
            yield SwappedIn(unit)

    def _last_running(self, first: Request) -> Request | None:
        """Return the last running request that may be preempted: `first` or a later request.

        Requests before `first` may already be in the step. Requests that compute KV for a peer are
        skipped, because the peer may read their blocks at any time.

        Returns:
            None if `first` and all later requests compute KV for a peer.
        """
        for request in reversed(self.running.in_order):
            if not request.produces:
                return request
            if request is first:
                break
        return None

    def _preempt(self, victim: Request, *, beneficiary: Request) -> Preempted | SwappedOut:
        """Return the decision that swaps out or preempts `victim`.

        A swap includes all running requests of the victim's sample group. If `beneficiary`, the
        request that needs the memory, is in the same group, `victim` is preempted without a swap.
        """
        group = victim.group
        if group is None or group is not beneficiary.group:
            in_order = self.running.in_order
            members = (
                [victim] if group is None else [other for other in in_order if other.group is group]
            )
            sequences = [sequence for member in members for sequence in member.sequences]
            if self._wants_swap(members) and self.kv.can_swap_out(sequences):
                return SwappedOut(members)
        return Preempted(victim)

    def _wants_swap(self, members: list[Request]) -> bool:
        if self.mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return self.mode == "swap"

    def _holds_all_memory(self, search: Request) -> bool:
        """Return whether the beam search `search` holds all blocks that are not free."""
        own = {block.block_id for beam in search.sequences for block in beam.blocks}
        return len(own) + self.kv.num_free_blocks == self.kv.pool.num_blocks

    def _out_of_memory(self, search: Request) -> Finished:
        message = (
            f"beam_width={search.sampling_params.beam_width} has used up all "
            f"{self.kv.pool.num_blocks} KV blocks; "
            "use fewer beams, fewer tokens or an engine with more KV memory"
        )
        return Finished.without_token(search, FinishReason.LENGTH, ErrorCode.LENGTH, message)
