"""Applies the results of a step: caches blocks, appends tokens, advances beams, ends requests."""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.executor.step import ModelRunnerOutput
from baton_engine.scheduling.decisions import Finished, LazyDecisions, Queued
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.sequence_groups.beams import BeamSearches
from baton_engine.scheduling.step import in_flight
from baton_engine.scheduling.step.in_flight import ScheduledRange
from baton_protocol.engine_messages import EngineCoreOutput, ErrorCode, FinishReason, TokenLogprobs


class StepResults:
    """Applies the results of steps, and decides which requests end or are queued again."""

    def __init__(self, state: SchedulerState, beams: BeamSearches) -> None:
        self.kv = state.kv
        self.worker = state.worker
        self.running = state.running
        self.beams = beams
        self.stop_rules = state.stop_rules
        self.outputs = state.outputs
        self.counters = state.counters

    def take(
        self, step_id: int, ranges: Sequence[ScheduledRange], ran: ModelRunnerOutput
    ) -> LazyDecisions[Finished | Queued]:
        """Apply the results of a step. Yield decisions that end requests or queue them again.

        Args:
            ranges: ranges that the step was scheduled to run.
            ran: results from the workers.

        Raises:
            RuntimeError: the requests that sampled are not those that were scheduled to sample.
        """
        sampled, vectors = ran.sampled_token_ids, ran.pooler_output
        has_optional_outputs = bool(ran.prompt_logprobs or ran.routed_experts)
        for entry in ranges:
            sequence, start, end, samples, num_preemptions = entry
            in_flight.count_returned(entry)
            if sequence.status is RequestStatus.FINISHED:  # ended while the step was in flight
                continue
            token_id = sampled.get(sequence.request_id)
            vector = vectors.get(sequence.request_id) if vectors else None
            if (token_id is not None or vector is not None) != samples:
                raise RuntimeError(
                    f"step {step_id} returned the sampled token {token_id} for {sequence!r}, but "
                    f"the step was scheduled to sample {'a' if samples else 'no'} token"
                )
            if start < sequence.num_prompt_tokens:
                self.counters.prompt_tokens_computed += min(end, sequence.num_prompt_tokens) - start
            if num_preemptions == sequence.num_preemptions:  # else the blocks were freed
                self.kv.cache_blocks(sequence, end)
            if has_optional_outputs:
                self.outputs.join_optional_outputs(
                    sequence.root or sequence, start, ran, ran_as=sequence.request_id
                )
            if vector is not None:
                yield _pooled(sequence, vector)
            elif token_id is not None:
                if sequence.root is not None:
                    finished = self._report_beam(
                        sequence.root, sequence, ran.logprobs.get(sequence.request_id)
                    )
                else:
                    finished = self._append(sequence, token_id, ran)
                if finished is not None:
                    yield finished
            if sequence.num_in_flight == 0 and sequence.status is RequestStatus.WAITING_FOR_STEPS:
                yield Queued(sequence)

    def discard(self, ranges: Sequence[ScheduledRange]) -> LazyDecisions[Queued]:
        """Undo the scheduling of a step whose tokens have not run. Later steps run these tokens.

        Yield decisions that queue preempted requests again.

        Args:
            ranges: ranges that the step was scheduled to run.
        """
        for entry in ranges:
            sequence = entry.sequence
            in_flight.count_dropped(entry)
            if sequence.status is RequestStatus.FINISHED:
                continue
            self.worker.forget(sequence)  # the worker may lack blocks that the step added
            if sequence.num_in_flight == 0 and sequence.status is RequestStatus.WAITING_FOR_STEPS:
                yield Queued(sequence)

    def advance_beams(self, root: Request) -> Finished | None:
        """Advance a beam search if all its beams have run.

        Returns:
            The decision that ends the search, or None if the search continues.
        """
        group = root.beams
        if group is None or not group.complete:
            return None
        self.beams.advance(root)
        if group.live:
            return None
        beams = list(group.finished)
        if not beams:
            return Finished.without_token(
                root,
                FinishReason.ERROR,
                ErrorCode.INTERNAL,
                "the beam search ended without a result: no token was possible for any beam",
            )
        best = beams[0]
        self.counters.generation_tokens += len(best.token_ids)
        output = EngineCoreOutput(
            request_id=root.request_id,
            new_token_ids=best.token_ids,
            token_offset=root.num_generated_tokens,
            finish_reason=best.finish_reason,
            stop_token_id=best.stop_token_id,
            new_logprobs=best.logprobs,
            beams=beams,
        )
        return Finished(root, output)

    def advance_resumed(self) -> LazyDecisions[Finished]:
        """Advance each beam search whose last step returned while the search was swapped out.

        A search that advances may free blocks, and the step under construction may swap KV into
        these blocks. Therefore, call this method after the step's last swap-in. Start no KV load in
        the same step, because the load could write to these blocks.
        """
        for request in self.running.values():
            if (finished := self.advance_beams(request)) is not None:
                yield finished

    def _append(self, request: Request, token_id: int, ran: ModelRunnerOutput) -> Finished | None:
        request.token_ids.append(token_id)
        self.counters.generation_tokens += 1
        reason, error, error_code = self.stop_rules.take_token(request)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            token_offset=len(request.token_ids) - request.num_prompt_tokens - 1,
            finish_reason=reason,
        )
        if reason is FinishReason.STOP and self.stop_rules.is_stop_token(request, token_id):
            output.stop_token_id = token_id
        if error:
            output.error, output.error_code = error, error_code
        logprobs = ran.logprobs.get(request.request_id)
        if logprobs is not None:
            output.new_logprobs = [logprobs]
        if ran.num_nans_in_logits:
            output.num_nans_in_logits = ran.num_nans_in_logits.get(request.request_id, 0)
            self.counters.num_nans_in_logits += output.num_nans_in_logits
        if reason is not None:
            return Finished(request, output)
        self.outputs.add(request, output)
        return None

    def _report_beam(
        self, root: Request, beam: Request, logprobs: TokenLogprobs | None
    ) -> Finished | None:
        self.beams.report(beam, logprobs)
        # A swapped search advances once it is resumed.
        return self.advance_beams(root) if root.status is RequestStatus.RUNNING else None


def _pooled(request: Request, vector: bytes) -> Finished:
    output = EngineCoreOutput(
        request.request_id, [], finish_reason=FinishReason.STOP, pooler_output=vector
    )
    return Finished(request, output)
