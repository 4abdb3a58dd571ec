"""Scheduler: continuous batching, chunked prefill, preemption, sample groups, beam search.

`schedule()` builds the next step: running requests continue, then others join the batch. Admission
decides which requests join, preemption which requests lose their blocks or get them back, and
`RequestLifecycle` applies these decisions.
`update_from_output()` applies the results of a step and returns outputs for clients. No
collaborator calls the scheduler.

Several steps may be in flight. `schedule()` counts tokens as computed as soon as they are
scheduled. Workers run steps and return results in the order of scheduling, so a step may use blocks
that an earlier step in flight frees.

Without asynchronous scheduling, a request is in one step at a time. With it, a request may be
scheduled before the scheduler has the request's last token, because the worker already has that
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.scheduling.batch_admission import BatchAdmission
from baton_engine.scheduling.decisions import (
    Admitted,
    Decision,
    Finished,
    LoadStarted,
    Preempted,
    Queued,
    SwappedIn,
    SwappedOut,
    WaitsForPrompt,
)
from baton_engine.scheduling.handoff.remote_prefill import RemotePrefill
from baton_engine.scheduling.preemption import Preemptor
from baton_engine.scheduling.prompt_chunks import PromptChunks
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.request_lifecycle import RequestLifecycle
from baton_engine.scheduling.request_limits import RequestRefusedError, check_request
from baton_engine.scheduling.scheduler_state import PauseState, SchedulerState
from baton_engine.scheduling.sequence_groups.beams import BeamSearches
from baton_engine.scheduling.step.builder import StepBuilder
from baton_engine.scheduling.step.in_flight import ScheduledRange
from baton_engine.scheduling.step.results import StepResults
from baton_protocol.engine_messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    PrefillResult,
)


class Scheduler:
    """Decides which requests run in each step."""

    def __init__(self, state: SchedulerState) -> None:
        """Create a scheduler. `state` must have no requests yet."""
        self.state = state
        self.draining = False
        self.pause_state = PauseState.UNPAUSED
        #: Whether the last step ran tokens, preempted or resumed requests, ended a request's wait
        #: or carried metadata for the connector. If so, another step may find work.
        self.made_progress = False
        self._in_flight: dict[int, list[ScheduledRange]] = {}
        self._num_steps = 0
        self._beams = BeamSearches(state)
        self._preemptor = Preemptor(state)
        self._chunks = PromptChunks(state)
        self._admission = BatchAdmission(state)
        self._remote_prefill = RemotePrefill(state)
        self._results = StepResults(state, self._beams)
        self._lifecycle = RequestLifecycle(state, self._beams, self._remote_prefill)

    # Build a step

    def schedule(self) -> SchedulerOutput:
        """Build the next step. `_fill` selects the requests that run."""
        step = StepBuilder(
            self.state.kv,
            self.state.worker,
            self._num_steps,
            self.state.config.max_num_batched_tokens,
        )
        self._num_steps += 1
        changed = self._settle(self.state.grammars.take_compiled())
        changed |= self._settle(self.state.groups.take_ready())
        if self.pause_state is not PauseState.PAUSED_ALL:
            changed |= self._fill(step)
        return self._finish_step(step, changed)

    def _fill(self, step: StepBuilder) -> bool:
        """Fill a step with requests, as token budget, places in the batch and KV memory allow.

        1. Running requests continue: decodes first, then prompt chunks.
        2. Requests whose KV has been loaded join the batch. They come before swapped requests,
           which may need the blocks that the loaded requests hold.
        3. Swapped requests get device blocks again. They run from the next step on.
        4. If no request was resumed and none is swapped out, waiting requests join the batch or
           start to load KV.

        If 1 preempts or swaps out a request, 2 to 4 are skipped.

        Returns:
            Whether any request was preempted, swapped out or swapped in.
        """
        if self._continue_running(step):
            # The preemption has freed memory for running requests. A request admitted in the same
            # step would take this memory. A KV load could write to a block before the worker has
            # swapped out the block's old content.
            return True
        admits = self.pause_state is PauseState.UNPAUSED
        preempted = admits and self._apply(step, self._admission.admit_loaded(step))
        resumed = self._apply(step, self._preemptor.resume())
        if resumed:
            self._settle(self._results.advance_resumed())
        elif admits and not self.state.swapped:
            self._apply(step, self._admission.admit(step))
        return preempted or resumed

    def _continue_running(self, step: StepBuilder) -> bool:
        """Schedule a token of each decoding sequence, then prompt chunks with the remaining budget.

        Requests are visited in order, and a decode preempts only itself or later requests. So no
        request that is already in the step is preempted. Only decodes need new blocks here, because
        a prompt gets all its blocks at admission.

        Returns:
            Whether any request was preempted or swapped out.
        """
        moved = decodes_in_flight = False
        running, run_ahead = RequestStatus.RUNNING, self.state.run_ahead
        for request in self.state.running.values():
            if step.budget == 0:
                break
            if request.status is not running:
                continue  # this step has preempted the request to free blocks for an earlier one
            if request.beams is not None:
                beams = request.beams.to_run()
                if beams and beams[0].num_uncomputed_tokens > 1:  # the first beam runs the prompt
                    step.prefills += beams
                else:
                    moved |= self._decode(step, request, beams[: step.budget])
            elif request.num_in_flight and not run_ahead.allows(request):
                decodes_in_flight |= request.num_uncomputed_tokens <= 1
            elif request.num_uncomputed_tokens > 1:
                step.prefills.append(request)
            elif step.may_write(request):
                step.run(request, 1)
            else:
                moved |= self._decode(step, request, [request])
        if step.ranges or decodes_in_flight:  # a long step delays the next token of each decode
            step.budget = self.state.prompt_budget.limit(step.budget)
        for sequence in step.prefills:
            if step.budget == 0:
                break
            self._run_chunk(step, sequence)
        return moved

    def _decode(self, step: StepBuilder, request: Request, sequences: Sequence[Request]) -> bool:
        """Schedule a token of each of `sequences`, or none if preemption frees too little memory.

        Requests are preempted until there is enough memory. No sequence is scheduled before there
        is memory for all `sequences`, because a beam search is preempted as a whole.

        Args:
            sequences: sequences of `request`.

        Returns:
            Whether any request was preempted or swapped out.
        """
        moved = False
        while not step.has_memory_for(sequences):
            decision = self._preemptor.preempt_for(request)
            if decision is None:
                return moved
            moved |= self._apply(step, [decision])
            if request.status is not RequestStatus.RUNNING:
                return moved
        for sequence in sequences:
            step.run_decode(sequence)
        return moved

    def _run_chunk(self, step: StepBuilder, sequence: Request) -> None:
        """Schedule the next tokens of a sequence whose blocks are allocated.

        `PromptChunks` limits the number of tokens.
        """
        step.run(sequence, self._chunks.num_tokens(step, sequence))

    def _apply(self, step: StepBuilder, decisions: Iterable[Decision]) -> bool:
        """Apply decisions that fill `step`.

        Returns:
            Whether any request was preempted, swapped out or swapped in.
        """
        moved = False
        for decision in decisions:
            match decision:
                case Admitted(request, cached, source):
                    self._lifecycle.start(step, request, cached, source)
                    self._run_chunk(step, request.sequences[0])
                case LoadStarted(request, cached):
                    self._lifecycle.start_load(request, cached)
                case WaitsForPrompt(request):
                    self._lifecycle.wait_for_prompt(request)
                case Finished():
                    self._settle([decision])
                case Preempted(request):
                    moved = True
                    self._lifecycle.preempt(request)
                case SwappedOut(requests):
                    moved = True
                    self._lifecycle.swap_out(step, requests)
                case SwappedIn(requests):
                    moved = True
                    self._lifecycle.swap_in(step, requests)
        return moved

    def _settle(self, decisions: Iterable[Finished | Queued]) -> bool:
        """Apply decisions that end or queue requests.

        Returns:
            Whether `decisions` contained any decision.
        """
        found = False
        for decision in decisions:
            found = True
            match decision:
                case Finished(request, output):
                    self._lifecycle.finish(request, output)
                case Queued(request):
                    self._lifecycle.enqueue(request)
        return found

    def _finish_step(self, step: StepBuilder, changed: bool) -> SchedulerOutput:
        """Complete and return the output of `step`, and record the ranges that are in flight.

        Add connector metadata, offload copies, and the ids of sequences that workers must remove.

        Args:
            changed: whether a request was preempted or resumed, or a request's wait ended.
        """
        for entry in step.ranges:
            if entry.sequence.kv_transfer is not None and entry.sequence.produces:
                self.state.handoff.save(entry.sequence, entry.end)
        output = step.output
        output.store, output.restore = self.state.kv.take_offload_copies()
        if step.ranges:
            self._in_flight[output.step_id] = step.ranges
        if output.reaches_model_runner:  # else workers only pass metadata to the connector
            output.finished_request_ids = self.state.worker.take_forgotten_ids()
        output.connector = self.state.handoff.take_metadata()
        self.made_progress = bool(output.reaches_model_runner or output.connector or changed)
        return output

    # Results of a step

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Apply the results of a step and the connector's report. Return the outputs for clients.

        Pass the steps in the order in which they were scheduled.
        """
        ranges = self._in_flight.pop(step.step_id, [])
        self._settle(self._results.take(step.step_id, ranges, output))
        for request in self.state.handoff.update(output.connector):
            self._settle(self._remote_prefill.end_load_if_ready(request))
        self.made_progress |= bool(step.reaches_model_runner or output.connector)
        return self.take_outputs()

    def observe_duration(self, step: SchedulerOutput, seconds: float) -> None:
        """Adjust the prompt budget to the duration of a step, see `PromptBudget.observe`.

        Call this before `update_from_output` for the same step.
        """
        if self.state.prompt_budget.target_s:
            num_decodes = self.num_decodes(step)
            num_prompt_tokens = step.total_num_scheduled_tokens - num_decodes
            self.state.prompt_budget.observe(num_prompt_tokens, num_decodes, seconds)

    def num_decodes(self, step: SchedulerOutput) -> int:
        """Return how many sequences decode in `step`, which is in flight."""
        return sum(entry.is_decode for entry in self._in_flight.get(step.step_id, ()))

    def grammar_output(self, step: SchedulerOutput) -> GrammarOutput | None:
        """Return bitmasks of the tokens that grammars allow in `step`, or None without grammars.

        Call this while the model runs, before `update_from_output` for the same step.
        """
        grammars = {
            entry.sequence.request_id: entry.sequence.grammar
            for entry in self._in_flight.get(step.step_id, ())
            if entry.samples and entry.sequence.grammar is not None and not entry.sequence.finished
        }
        return self.state.grammars.bitmask(grammars)

    def discard(self, step: SchedulerOutput) -> None:
        """Undo the scheduling of tokens in the newest step in flight. Later steps run these tokens.

        Call this if workers did not get the step, or if they failed to run its tokens. The step's
        other changes, such as block copies, are not undone. Workers must apply these changes
        exactly once. If workers did not get the step, send them `step.without_tokens()`.
        """
        self._settle(self._results.discard(self._in_flight.pop(step.step_id, [])))
        self.state.handoff.take_back(step.connector.saves)

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs for clients that were collected since the last call."""
        return self.state.outputs.take()

    # Requests arrive and leave

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: the request is not accepted, and the scheduler is unchanged.
        """
        check_request(
            core_request,
            self.state.limits,
            requests=self.state.requests,
            transfer_ids=self.state.handoff,
            num_queued=self.state.queues.num_without_memory + len(self.state.grammars),
            draining=self.draining,
        )
        request = Request(core_request, ignore_priority=self.state.config.policy == "fcfs")
        self._join_group_and_compile(request, core_request.group_id)
        self.state.requests[request.request_id] = request
        self.state.outputs.event(request, EngineCoreEventType.QUEUED)
        if request.sampling_params.beam_width:
            self._beams.start(request)
        early_result = self._remote_prefill.take_early(request.request_id)
        if request.consumes:
            self._lifecycle.wait_for_remote_kv(request)
            if early_result is not None:
                self._settle(self._remote_prefill.add_result(request, early_result))
        else:
            self._lifecycle.enqueue(request)
            if request.produces:
                self.state.handoff.offer(request)

    def _join_group_and_compile(self, request: Request, group_id: str) -> None:
        """Add a new request to its sample group, and start to compile its grammar.

        Raises:
            RequestRefusedError: the request does not fit its group, or its grammar is refused. The
                group is unchanged.
        """
        try:
            if group_id:
                self.state.groups.join(group_id, request)
            self.state.grammars.compile(request)
        except ValueError as error:
            if request.group is not None:
                self.state.groups.leave(request)
            raise RequestRefusedError(ErrorCode.INVALID, str(error)) from error

    def forget_refused(self, request_id: str) -> None:
        """Discard stored and later prefill results of a refused request.

        A late result must not reach another request with the same id. Do nothing if an unfinished
        request has this id.
        """
        if request_id not in self.state.requests:
            self._remote_prefill.forget(request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort the requests with these ids, and ignore unknown ids.

        If a request has already ended and its blocks are kept for a peer, cancel the transfer.
        """
        for request_id in request_ids:
            request = self.state.requests.get(request_id)
            if request is not None:
                self._settle([Finished.without_token(request, FinishReason.ABORT)])
            else:
                self.state.handoff.cancel_finished(request_id)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End all requests with an error."""
        for request in list(self.state.requests.values()):
            self._settle([Finished.without_token(request, FinishReason.ERROR, code, message)])

    def add_prefill_result(self, result: PrefillResult) -> None:
        """Apply the result of a request's prefill stage on a peer: the first token, or an error.

        The result may arrive before the request, and is then kept. A request waits for its result
        without a timeout: the gateway aborts a request that waits too long.
        """
        request = self.state.requests.get(result.request_id)
        if request is None:
            self._remote_prefill.remember_early(result)
        else:
            self._settle(self._remote_prefill.add_result(request, result))

    # State

    @property
    def has_work(self) -> bool:
        """Whether there are requests, connector metadata to send, or unfinished KV transfers."""
        return (
            bool(self.state.requests)
            or self.state.handoff.has_metadata
            or self.state.handoff.num_held > 0
        )

    def set_pause_state(self, state: PauseState) -> None:
        """Set which requests `schedule` may run from now on.

        Requests can be added and aborted in every state.
        """
        self.pause_state = state

    def preempt_all(self) -> None:
        """Free the blocks of all running, swapped and loaded requests. Their KV is computed again.

        Requests that compute KV for a peer keep their blocks, because the peer may read them.
        """
        for request in [*self.state.running.values(), *self.state.queues.loaded]:
            if not request.produces:
                self._lifecycle.preempt(request)
        for request in self.state.swapped.take_all():
            self._lifecycle.compute_again(request)

    def reset_prefix_cache(self, reset_running: bool = False) -> None:
        """Clear the prefix cache. If `reset_running` is set, first call `preempt_all`."""
        if reset_running:
            self.preempt_all()
        self.state.kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return a copy of the statistics: counters since engine start, and gauges at this call."""
        stats = self.state.stats()
        stats.draining = self.draining
        return stats
