"""Admission: decides which waiting request joins the batch, or starts to load its KV.

To start, a request needs a place in the batch, token budget, and KV blocks for its prompt and
generated tokens. All queues are ordered by (priority, arrival). If the first request does not fit
in the free blocks, later requests do not overtake it. Requests that wait for remote KV, for a
grammar or for the prompt of their sample group do not block other requests.

Requests of one priority do not starve each other. When all earlier requests have ended, the first
request is admitted as soon as enough blocks are free. It is preempted last. Its prompt gets tokens
in every step: each decode takes one token of the budget, and the first prompt gets what is left. At
most `max_num_batched_tokens` sequences run, and one of them is this prompt, so the decodes leave at
least one token. Requests with a lower priority value always come first.
"""

from __future__ import annotations

from baton_engine.kv_cache.kv_cache_manager import CachedBlock
from baton_engine.scheduling.decisions import (
    Admitted,
    LazyDecisions,
    LoadStarted,
    Preempted,
    WaitsForPrompt,
)
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.step.builder import StepBuilder


class BatchAdmission:
    """Selects the waiting requests that start in a step, in the order of the queues."""

    def __init__(self, state: SchedulerState) -> None:
        self.kv = state.kv
        self.queues = state.queues
        self.running = state.running
        self.swapped = state.swapped
        self.groups = state.groups
        self.enable_chunked_prefill = state.config.enable_chunked_prefill
        #: Blocks that stay free when a request is admitted beside running requests.
        self.watermark_blocks = state.watermark_blocks

    def admit_loaded(
        self, step: StepBuilder
    ) -> LazyDecisions[Admitted | WaitsForPrompt | Preempted]:
        """Yield decisions that start requests whose KV has been loaded from a peer.

        An earlier request in the queue `waiting` starts first if enough blocks are free. A loaded
        request that needs more blocks than are free is preempted. While requests are swapped out,
        only loaded requests start here, because the free blocks are reserved for the swapped
        requests.
        """
        while (
            step.budget > 0
            and self.running.has_places(1)
            and (first := self.queues.loaded.peek()) is not None
        ):
            earlier = None if self.swapped else self.queues.waiting.first_before(first)
            if earlier is not None and self.queues.waiting_to_load.first_before(earlier) is None:
                # `earlier` would starve if loaded requests took every place that becomes free.
                if not self.running.has_places(earlier.max_seqs):
                    return
                if (decision := self._admit_first(earlier, step)) is not None:
                    yield decision
                    continue
            if self.kv.can_allocate(first, first.num_tokens):
                yield Admitted(first)
            else:  # the prefill stage sent more tokens than the load reserved blocks for
                yield Preempted(first)

    def admit(self, step: StepBuilder) -> LazyDecisions[Admitted | WaitsForPrompt | LoadStarted]:
        """Yield decisions on the waiting requests: to start one, load its KV or let it wait.

        Ends at the first request that must stay in its queue, for example for lack of free KV
        blocks. When the step's token budget or the places for running requests are used up, only
        KV loads start.
        """
        while True:
            to_load = self.queues.waiting_to_load.peek()
            to_run = self.queues.waiting.peek() if step.budget > 0 else None
            if to_run is not None and not self.running.has_places(to_run.max_seqs):
                to_run = None
            decision: Admitted | WaitsForPrompt | LoadStarted | None = None
            if to_load is not None and (to_run is None or to_load.order < to_run.order):
                decision = self._start_load(
                    to_load, keep_for=self.queues.waiting.first_before(to_load)
                )
            elif to_run is not None:
                decision = self._admit_first(to_run, step)
            if decision is None:
                return
            yield decision

    def _admit_first(self, request: Request, step: StepBuilder) -> Admitted | WaitsForPrompt | None:
        """Return the decision to start `request`, or to let it wait for its group's prompt.

        It waits while another request of its group computes or loads the prompt. `request` must be
        the first in the queue `waiting`.

        Returns:
            None if too few blocks are free, or if the request must wait for an empty step (see
            `_admit`).
        """
        group = request.group
        if group is not None and self.groups.is_computing_prompt(group, step):
            return WaitsForPrompt(request)
        source = self.groups.source(request, step) if request.may_reuse_kv else None
        return (
            self._admit_sharing(request, source)
            if source is not None
            else self._admit(request, step)
        )

    def _admit(self, request: Request, step: StepBuilder) -> Admitted | None:
        """Return the decision to admit a request with blocks for all its tokens.

        Returns:
            None if too few blocks are free. Without chunked prefill, also None if the tokens
            without cached KV exceed the remaining token budget of `step`, unless `step` is empty.
        """
        sequence, kv = request.sequences[0], self.kv
        cached: list[CachedBlock] = []
        if request.may_reuse_kv:
            cached = kv.find_cached_prefix(sequence, sequence.num_reusable_tokens)
        num_uncached = sequence.num_tokens - len(cached) * kv.block_size
        if not self.enable_chunked_prefill and num_uncached > step.budget and step.ranges:
            return None  # In an empty step, even a request with more tokens than the budget starts.
        keep_free = self._keep_free
        if request.beams is not None:
            keep_free = max(
                keep_free, request.beams.num_blocks_wanted - kv.num_blocks_for(sequence.num_tokens)
            )
        if not kv.can_allocate(sequence, sequence.num_tokens, cached, keep_free=keep_free):
            return None
        return Admitted(request, cached)

    def _admit_sharing(self, request: Request, source: Request) -> Admitted | None:
        """Return the decision to admit a request that shares the prompt blocks of `source`.

        Returns:
            None if too few blocks are free for the tokens that the request does not share.
        """
        kv = self.kv
        num_full_blocks = request.num_shared_tokens // kv.block_size
        num_new = kv.num_blocks_for(request.num_tokens) - num_full_blocks
        if num_new + self._keep_free > kv.num_free_blocks:
            return None
        return Admitted(request, source=source)

    @property
    def _keep_free(self) -> int:
        """Number of blocks that an admission must leave free for new tokens of running requests."""
        return self.watermark_blocks if len(self.running) else 0

    @property
    def _keep_free_of_loads(self) -> int:
        """Number of blocks that must stay free after a load has taken its blocks.

        At least one block stays free for each running, loading or loaded sequence.

        A load takes blocks long before its request runs. Without this reserve, loads could take all
        blocks, and running requests would preempt each other.
        """
        num_growing = self.running.num_seqs + len(self.queues.loading) + len(self.queues.loaded)
        return max(self._keep_free, num_growing)

    def _start_load(self, request: Request, keep_for: Request | None) -> LoadStarted | None:
        """Return the decision to start the load of a request's KV from a peer.

        Args:
            request: first request of `waiting_to_load`.
            keep_for: earlier request that waits to run. Enough blocks for `keep_for` stay free.
                None: no earlier request waits.

        Returns:
            None if too few blocks are free.
        """
        kv = self.kv
        if keep_for is not None:
            wanted = kv.num_blocks_for(request.num_tokens + 1) + kv.num_blocks_for(
                keep_for.num_tokens
            )
            if wanted > kv.num_free_blocks:
                return None
        cached = kv.find_cached_prefix(request, request.num_tokens)
        # One token more, so that the request can start without waiting for more memory.
        num_tokens, keep_free = request.num_tokens + 1, self._keep_free_of_loads
        if not kv.can_allocate(request, num_tokens, cached, keep_free=keep_free):
            return None
        return LoadStarted(request, cached)
