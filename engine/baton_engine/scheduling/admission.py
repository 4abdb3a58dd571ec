"""Where requests wait, and how they get into the batch: memory for all their known tokens, a place, and budget.

One order rules all queues, (priority, arrival): who comes first and finds no memory is not overtaken by a later one. Requests that
wait for something else (remote KV, a grammar, a sibling's prompt) are not in the way. So nobody starves: a request becomes the
first of its priority after finitely many ends, the first is admitted as soon as memory comes free, and from then on it is the
last to be preempted and the first to get budget that decodes leave; and decodes, one token each, never take all of it, because
no more requests run than the budget has tokens. A priority waits for the ones before it, by definition.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton_engine.kv_cache.manager import KVCacheManager
from baton_engine.scheduling.decisions import Admitted, LoadStarted, Preempted, WaitsForPrompt
from baton_engine.scheduling.groups.samples import SampleGroups
from baton_engine.scheduling.queues import RunningRequests, WaitingRequests
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.step_builder import StepBuilder


class Admission:
    """Each decision is to be applied before the next is asked for."""

    def __init__(
        self,
        kv: KVCacheManager,
        queues: WaitingRequests,
        running: RunningRequests,
        groups: SampleGroups,
        *,
        max_num_seqs: int,
        chunked: bool,
    ) -> None:
        """
        Args:
            chunked: a prompt may run in several steps.
        """
        self._kv = kv
        self._queues = queues
        self._running = running
        self._groups = groups
        self._max_num_seqs = max_num_seqs
        self._chunked = chunked

    def admit_loaded(
        self, step: StepBuilder, *, only_loaded: bool = False
    ) -> Iterator[Admitted | WaitsForPrompt | Preempted]:
        """Starts requests whose KV came from a peer.

        Args:
            only_loaded: swapped requests wait for memory; nobody else takes any.
        """
        while step.budget > 0 and self._has_place(1) and (first := self._queues.loaded.peek()) is not None:
            earlier = None if only_loaded else self._queues.waiting.first_before(first)
            if earlier is not None and self._queues.waiting_to_load.first_before(earlier) is None:
                # It would starve if every place that comes free went to those that are loaded.
                if not self._has_place(earlier.max_seqs):
                    return
                if (decision := self._admit_first(earlier, step)) is not None:
                    yield decision
                    continue
            request = self._queues.loaded.pop()
            if self._kv.allocate(request, request.num_tokens) is not None:
                yield Admitted(request, request)
            else:  # more first tokens came than there was room reserved for
                yield Preempted(request)

    def admit(self, step: StepBuilder) -> Iterator[Admitted | WaitsForPrompt | LoadStarted]:
        """Starts requests without KV, and loads of those whose KV is computed elsewhere, until one does not fit."""
        while True:
            to_load = self._queues.waiting_to_load.peek()
            to_run = self._queues.waiting.peek() if step.budget > 0 else None
            if to_run is not None and not self._has_place(to_run.max_seqs):
                to_run = None
            decision: Admitted | WaitsForPrompt | LoadStarted | None = None
            if to_load is not None and (to_run is None or to_load.order < to_run.order):
                decision = self._start_load(to_load, keep_for=self._queues.waiting.first_before(to_load))
            elif to_run is not None:
                decision = self._admit_first(to_run, step)
            if decision is None:
                return
            yield decision

    def _has_place(self, num_seqs: int) -> bool:
        return self._running.num_seqs + num_seqs <= self._max_num_seqs

    def _admit_first(self, request: Request, step: StepBuilder) -> Admitted | WaitsForPrompt | None:
        """Decides on the first request of `waiting`; None if it does not fit now."""
        group = request.group
        if group is not None and self._groups.is_computing_prompt(group, step):
            return WaitsForPrompt(request)
        source = self._groups.source(request, step) if request.report.prompt_logprobs is None else None
        return self._admit_sharing(request, source, step) if source is not None else self._admit(request, step)

    def _admit(self, request: Request, step: StepBuilder) -> Admitted | None:
        """Gives a request all blocks its known tokens need; None if it does not fit now."""
        sequence, kv = request.sequences[0], self._kv
        # The last known token is always computed here: it gives the logits. With prompt_logprobs every position does.
        reads_cache = request.report.prompt_logprobs is None
        cached = kv.find_cached_prefix(sequence, sequence.num_tokens - 1) if reads_cache else []
        num_uncached = sequence.num_tokens - len(cached) * kv.block_size
        if not self._chunked and num_uncached > step.budget and not step.empty:
            return None  # One that outgrew the budget before it was preempted runs in several steps, begun alone.
        keep_free = self._keep_free
        if request.beams is not None:
            keep_free = max(keep_free, request.beams.num_blocks_wanted - kv.num_blocks_for(sequence.num_tokens))
        if kv.allocate(sequence, sequence.num_tokens, cached, keep_free=keep_free) is None:
            return None
        sequence.num_computed_tokens = len(cached) * kv.block_size
        if reads_cache and not request.started:
            kv.count_lookup(sequence.num_tokens, sequence.num_computed_tokens)
        if request.group is not None:
            request.group.leader = request
        return Admitted(request, sequence)

    def _admit_sharing(self, request: Request, source: Request, step: StepBuilder) -> Admitted | None:
        """Lets a member of a group share the prompt's blocks of another one; None if the rest does not fit now."""
        kv = self._kv
        num_shared = request.num_prompt_tokens - 1  # the last one gives the logits
        num_new = kv.num_blocks_for(request.num_tokens) - num_shared // kv.block_size
        if num_new + self._keep_free > kv.num_free_blocks:
            return None
        kv.fork(source, request, num_shared)
        request.num_computed_tokens = num_shared
        copies = step.reserve(request, request.num_tokens)
        assert copies is not None, "the blocks were counted"
        step.output.block_copies += copies
        return Admitted(request, request)

    @property
    def _keep_free(self) -> int:
        """Blocks that an admission leaves to those that run."""
        return self._kv.watermark_blocks if len(self._running) else 0

    @property
    def _keep_free_of_loads(self) -> int:
        """Blocks that a load leaves: one for each sequence that decodes, or will once it is loaded, to grow into. Loads take their
        memory long before they run; without that they would fill it, and those that run would preempt each other for lack of it."""
        num_growing = self._running.num_seqs + len(self._queues.loading) + len(self._queues.loaded)
        return max(self._keep_free, num_growing)

    def _start_load(self, request: Request, keep_for: Request | None) -> LoadStarted | None:
        """Allocates the blocks of a CONSUME request; None if they do not fit now.

        Args:
            keep_for: an earlier request that waits for a slot; the load must leave enough memory for it.
        """
        kv = self._kv
        if keep_for is not None:
            wanted = kv.num_blocks_for(request.num_tokens + 1) + kv.num_blocks_for(keep_for.num_tokens)
            if wanted > kv.num_free_blocks:
                return None
        cached = kv.find_cached_prefix(request, request.num_tokens)
        # One token more: it must be able to start without waiting for memory while it holds some.
        if kv.allocate(request, request.num_tokens + 1, cached, keep_free=self._keep_free_of_loads) is None:
            return None
        request.num_computed_tokens = len(cached) * kv.block_size
        if not request.started:
            kv.count_lookup(request.num_tokens, request.num_computed_tokens)
        return LoadStarted(request, len(cached))
