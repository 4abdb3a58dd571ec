"""Applies decisions that queue, start, preempt, swap or end requests."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.scheduling.decisions import Finished, Queued, SwappedIn, SwappedOut
from baton_engine.scheduling.groups.beams import BeamSearches
from baton_engine.scheduling.handoff.remote_prefill import RemotePrefill
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.state import SchedulerState
from baton_engine.scheduling.step_builder import StepBuilder
from baton_protocol.messages import EngineCoreEventType, ErrorCode, FinishReason


@dataclass(slots=True)
class RequestLifecycle:
    """Applies decisions: moves requests between the queues, the batch and host memory."""

    state: SchedulerState
    beams: BeamSearches
    remote_prefill: RemotePrefill

    # Wait

    def enqueue(self, request: Request) -> None:
        """Queue a request for admission, or hold the request until its grammar is compiled."""
        if self.state.grammars.must_wait(request):
            self.state.grammars.wait(request)
        elif request.prefill_result is not None and request.blocks:
            request.status = RequestStatus.WAITING
            self.state.queues.loaded.push(request)
        else:
            request.status = RequestStatus.WAITING
            self.state.queues.waiting.push(request)

    def wait_for_prompt(self, request: Request) -> None:
        """Hold a waiting request until another request of its group has computed the prompt."""
        self.state.queues.waiting.discard(request)
        self.state.groups.wait(request)

    # Start

    def start(self, request: Request, sequence: Request) -> None:
        """Add a request to the batch. The request's blocks must be allocated.

        Args:
            sequence: the request itself, or the first beam of its search.
        """
        self.state.queues.waiting.discard(request)
        self.state.queues.loaded.discard(request)
        self._count_start(request, sequence)
        request.status = sequence.status = RequestStatus.RUNNING
        self.state.running.add(request)
        self.state.outputs.event(request, EngineCoreEventType.SCHEDULED)

    def start_load(self, request: Request, num_cached_blocks: int) -> None:
        """Start to load the KV of a request's prompt, except the first `num_cached_blocks`."""
        self.state.queues.waiting_to_load.discard(request)
        self._count_start(request, request)
        self.state.queues.loading[request.request_id] = request
        self.state.handoff.load(request, num_cached_blocks)

    def swap_in(self, step: StepBuilder, decision: SwappedIn) -> None:
        """Add swapped requests to the batch, and their host-to-device block copies to `step`."""
        step.output.swap_in += decision.copies
        self.state.swapped.remove(decision.requests)
        self.state.counters.num_swapped_in_blocks += len(decision.copies)
        for request in decision.requests:
            for sequence in [request, *request.sequences]:
                sequence.status = RequestStatus.RUNNING
            self.state.running.add(request)
            self.state.outputs.event(request, EngineCoreEventType.SCHEDULED)

    def _count_start(self, request: Request, sequence: Request) -> None:
        """Count the prompt tokens and the cached prompt tokens at a request's first start."""
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

    def swap_out(self, step: StepBuilder, decision: SwappedOut) -> None:
        """Remove requests from the batch, and add their device-to-host block copies to `step`."""
        step.output.swap_out += decision.copies
        self.state.swapped.add(decision.requests)
        self.state.counters.num_swapped_out_blocks += len(decision.copies)
        for request in decision.requests:
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

    def settle(self, decision: Finished | Queued | None) -> None:
        """Apply a decision that ends or queues one request. Do nothing for None."""
        match decision:
            case Finished(request, output):
                self.state.outputs.emit(request, output)
                self._end(
                    request,
                    aborted=output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR),
                )
            case Queued(request):
                self.state.awaiting_steps.pop(request.request_id, None)
                self.enqueue(request)

    def finish(
        self, request: Request, reason: FinishReason, code: ErrorCode | None = None, error: str = ""
    ) -> None:
        """End a request with an output that has no tokens."""
        self.settle(Finished.without_token(request, reason, code, error))

    def _end(self, request: Request, *, aborted: bool) -> None:
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
        self.state.handoff.release(request, aborted=aborted)
