"""Applies decisions that queue, start, preempt, swap or end requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.kv_cache.kv_cache_manager import CachedBlock
from baton_engine.scheduling.handoff.remote_prefill import RemotePrefill
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.sequence_groups.beams import BeamSearches
from baton_engine.scheduling.step.builder import StepBuilder
from baton_protocol.engine_messages import EngineCoreEventType, EngineCoreOutput, FinishReason


@dataclass(slots=True)
class RequestLifecycle:
    """Applies decisions: moves requests between the queues, the batch and host memory."""

    state: SchedulerState
    beams: BeamSearches
    remote_prefill: RemotePrefill

    # Wait

    def enqueue(self, request: Request) -> None:
        """Queue a request for admission, or hold the request until its grammar is compiled."""
        self.state.awaiting_steps.pop(request.request_id, None)
        if self.state.grammars.must_wait(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self.state.grammars.wait(request)
        elif request.has_loaded_kv:
            request.status = RequestStatus.WAITING
            self.state.queues.loaded.push(request)
        else:
            request.status = RequestStatus.WAITING
            self.state.queues.waiting.push(request)

    def wait_for_prompt(self, request: Request) -> None:
        """Hold a waiting request until another request of its `SampleGroup` has the prompt's KV."""
        self.state.queues.waiting.discard(request)
        request.status = RequestStatus.WAITING_FOR_PROMPT
        self.state.groups.wait(request)

    def wait_for_remote_kv(self, request: Request) -> None:
        """Queue a new request that loads the KV of its prompt from a peer."""
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self.state.queues.waiting_to_load.push(request)
        self.state.handoff.wait(request)

    # Start

    def start(
        self,
        step: StepBuilder,
        request: Request,
        cached: Sequence[CachedBlock],
        source: Request | None,
    ) -> None:
        """Add a request to the batch, with blocks for all its tokens.

        Args:
            step: receives the block copies that shared blocks require.
            cached: leading blocks that are in the prefix cache.
            source: request whose prompt blocks `request` shares, or None.
        """
        sequence, kv = request.sequences[0], self.state.kv
        if source is not None:
            kv.fork(source, request, request.num_shared_tokens)
            request.num_computed_tokens = request.num_shared_tokens
            copies = step.reserve(request, request.num_tokens)
            assert copies is not None, "the decision has counted the blocks"
            step.output.block_copies += copies
        elif request.has_loaded_kv:
            allocated = kv.allocate(request, request.num_tokens)
            assert allocated, "the decision has counted the blocks"
        else:
            self._allocate(sequence, sequence.num_tokens, cached)
            if request.may_reuse_kv:
                self._count_lookup(request, sequence)
            self.state.groups.lead(request)
        self._join_batch(request, sequence)

    def start_load(self, request: Request, cached: list[CachedBlock]) -> None:
        """Start to load the KV of a request's prompt, except the `cached` blocks."""
        self._allocate(request, request.num_tokens + 1, cached)
        self._count_lookup(request, request)
        self.state.queues.waiting_to_load.discard(request)
        self._count_start(request, request)
        self.state.queues.loading[request.request_id] = request
        self.state.handoff.load(request, len(cached))

    def swap_in(self, step: StepBuilder, requests: list[Request]) -> None:
        """Add swapped requests to the batch, and their host-to-device block copies to `step`."""
        copies = self.state.kv.swap_in(
            [sequence for request in requests for sequence in request.sequences]
        )
        assert copies is not None, "the decision has counted the blocks"
        step.output.swap_in += copies
        self.state.swapped.remove(requests)
        self.state.counters.num_swapped_in_blocks += len(copies)
        for request in requests:
            for sequence in [request, *request.sequences]:
                sequence.status = RequestStatus.RUNNING
            self.state.running.add(request)
            self.state.outputs.event(request, EngineCoreEventType.SCHEDULED)

    def _join_batch(self, request: Request, sequence: Request) -> None:
        """Add a request to the batch.

        Args:
            sequence: the sequence that runs first: `request`, or the first beam of its beam search.
        """
        self.state.queues.waiting.discard(request)
        self.state.queues.loaded.discard(request)
        self._count_start(request, sequence)
        request.status = sequence.status = RequestStatus.RUNNING
        self.state.running.add(request)
        self.state.outputs.event(request, EngineCoreEventType.SCHEDULED)

    def _allocate(self, sequence: Request, num_tokens: int, cached: Sequence[CachedBlock]) -> None:
        """Allocate blocks for `num_tokens` tokens of `sequence`, starting with the `cached` blocks.

        The tokens in `cached` blocks count as computed.
        """
        allocated = self.state.kv.allocate(sequence, num_tokens, cached)
        assert allocated, "the decision has counted the blocks"
        sequence.num_computed_tokens = len(cached) * self.state.kv.block_size

    def _count_lookup(self, request: Request, sequence: Request) -> None:
        """Add a prefix-cache lookup to the statistics, unless the request has started before."""
        if not request.started:
            self.state.kv.count_lookup(sequence.num_tokens, sequence.num_computed_tokens)

    def _count_start(self, request: Request, sequence: Request) -> None:
        """Mark the request as started. At its first start, count its prompt and cached tokens."""
        if request.started:  # counted already
            return
        request.started = True
        request.num_cached_tokens = min(sequence.num_computed_tokens, request.num_prompt_tokens)
        self.state.counters.prompt_tokens += request.num_prompt_tokens
        self.state.counters.prompt_tokens_cached += request.num_cached_tokens

    # Lose memory

    def preempt(self, request: Request) -> None:
        """Free the blocks of a running or loaded request, and queue the request again."""
        self.state.running.discard(request)
        self.state.queues.loaded.discard(request)
        if request.beams is not None:
            self.beams.count_blocks_wanted(request)
        self._count_preemption(request)
        self.compute_again(request)

    def compute_again(self, request: Request) -> None:
        """Free the blocks of a request, on the device and on the host, and queue the request again.

        A request that has steps in flight is queued once these steps have returned.
        """
        if request.beams is not None:
            self.beams.restart(request)
        self.state.kv.free(request)
        request.num_computed_tokens = 0
        self.state.worker.forget(request)
        if request.num_in_flight:
            request.status = RequestStatus.WAITING_FOR_STEPS
            self.state.awaiting_steps[request.request_id] = request
        else:
            self.enqueue(request)

    def swap_out(self, step: StepBuilder, requests: list[Request]) -> None:
        """Remove requests from the batch, and add their device-to-host block copies to `step`."""
        copies = self.state.kv.swap_out(
            [sequence for request in requests for sequence in request.sequences]
        )
        assert copies is not None, "the decision has counted the blocks"
        step.output.swap_out += copies
        self.state.swapped.add(requests)
        self.state.counters.num_swapped_out_blocks += len(copies)
        for request in requests:
            for sequence in request.sequences:
                sequence.status = RequestStatus.SWAPPED
                sequence.num_preemptions += sequence.root is not None
                self.state.worker.forget(sequence)
            self.state.running.discard(request)
            request.status = RequestStatus.SWAPPED
            self._count_preemption(request)

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        self.state.counters.num_preemptions += 1
        self.state.outputs.event(request, EngineCoreEventType.PREEMPTED)

    # End

    def finish(self, request: Request, output: EngineCoreOutput) -> None:
        """End a request with its last output. Free its blocks, unless a transfer may use them."""
        self.state.outputs.add(request, output)
        request_id = request.request_id
        if request in self.state.queues.waiting_to_load:
            self.state.handoff.decline(request)
        self.state.queues.discard(request)
        self.state.grammars.discard(request)
        self.state.swapped.discard(request)
        self.state.awaiting_steps.pop(request_id, None)
        self.state.running.discard(request)
        del self.state.requests[request_id]
        request.status = RequestStatus.FINISHED
        if request.group is not None:
            self.state.groups.leave(request)
        if request.beams is not None:
            self.beams.give_up(request)
        self.state.worker.forget(request)
        if request.consumes:
            self.remote_prefill.forget(request_id)
        aborted = output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        self.state.handoff.release(request, aborted=aborted)
