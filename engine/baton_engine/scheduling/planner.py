"""Planner: gives a step's tokens to running requests, first to decodes, then to prompt chunks.

`RunningPlanner.plan` changes the step while it yields decisions: it adds the tokens to the step
itself, and yields only the preemptions that decodes need. `decisions.py` has the reason.

Only decodes may need new blocks here, because a prompt gets all its blocks at admission. Requests
are visited in order, and a decode preempts only itself or later requests. Therefore no request that
is already in the step is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.scheduling.decisions import Finished, LazyDecisions, Preempted, SwappedOut
from baton_engine.scheduling.preemption import Preemptor
from baton_engine.scheduling.request import BeamGroup, Request, RequestStatus
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.step.builder import StepBuilder


class RunningPlanner:
    """Distributes a step's token budget over the running requests."""

    def __init__(self, state: SchedulerState, preemptor: Preemptor) -> None:
        self.running = state.running
        self.waiting = state.queues.waiting
        self.preemptor = preemptor
        self.prompt_budget = state.prompt_budget
        self.run_ahead = state.run_ahead
        #: 0: no limit.
        self.long_prefill_token_threshold = state.config.long_prefill_token_threshold
        #: Running sequences with more than one token to compute, collected for the current step.
        self._prefills: list[Request] = []

    def plan(self, step: StepBuilder) -> LazyDecisions[Preempted | SwappedOut | Finished]:
        """Add tokens of running requests to `step`, and yield the preemptions that this requires.

        If there are decodes, `prompt_budget` limits the tokens that are left for prompts.
        """
        prefills = self._prefills
        prefills.clear()
        decodes_in_flight = False
        running = RequestStatus.RUNNING  # reading the enum's member per request takes time
        for request in self.running.values():
            if step.budget == 0:
                break
            if request.status is not running:
                continue  # this step has preempted the request to free blocks for an earlier one
            if request.beams is not None:
                yield from self._plan_beams(step, request, request.beams)
            elif not request.num_in_flight or self.run_ahead.allows(request):
                if request.num_uncomputed_tokens > 1:
                    prefills.append(request)
                elif step.may_write(request):
                    step.run(request, 1)
                else:
                    yield from self._plan_decodes(step, request, [request])
            elif request.num_uncomputed_tokens <= 1:
                decodes_in_flight = True
        if step.ranges or decodes_in_flight:  # a long step delays the next token of each decode
            step.budget = self.prompt_budget.limit(step.budget)
        for sequence in prefills:
            if step.budget == 0:
                break
            # No prefill was preempted after it was collected: a decode preempts only itself or
            # requests behind it.
            self.run_chunk(step, sequence)

    def run_chunk(self, step: StepBuilder, sequence: Request) -> None:
        """Schedule as many tokens of `sequence` as the budget allows.

        At most `long_prefill_token_threshold` tokens are scheduled if a shorter prompt waits. The
        blocks of `sequence` must be allocated.
        """
        num_tokens = min(sequence.num_uncomputed_tokens, step.budget)
        threshold = self.long_prefill_token_threshold
        if 0 < threshold < num_tokens and self._shorter_prompt_waits(sequence):
            num_tokens = threshold
        step.run(sequence, num_tokens)

    def _shorter_prompt_waits(self, sequence: Request) -> bool:
        """Return whether the first waiting prompt, or another unfinished one, is shorter."""
        num_tokens = sequence.num_uncomputed_tokens
        first = self.waiting.peek()
        return (
            first is not None and first is not sequence and first.num_uncomputed_tokens < num_tokens
        ) or any(
            1 < other.num_uncomputed_tokens < num_tokens  # 1: only its next token is left
            for other in self._prefills
            if other is not sequence
        )

    def _plan_beams(
        self, step: StepBuilder, root: Request, group: BeamGroup
    ) -> LazyDecisions[Preempted | SwappedOut | Finished]:
        """Schedule the beams that have not run since the search last advanced.

        Yield the preemptions that this requires.
        """
        beams = [
            beam for beam in group.live if beam.num_uncomputed_tokens > 0 and not beam.num_in_flight
        ]
        if beams and beams[0].num_uncomputed_tokens > 1:  # a single beam that computes its prompt
            self._prefills += beams
        else:
            yield from self._plan_decodes(step, root, beams[: step.budget])

    def _plan_decodes(
        self, step: StepBuilder, request: Request, sequences: Sequence[Request]
    ) -> LazyDecisions[Preempted | SwappedOut | Finished]:
        """Schedule one token of every sequence of `request`, or no token if memory stays short.

        Yield preemptions until the memory suffices. No sequence is scheduled before there is memory
        for all `sequences`, because a beam search is preempted as a whole.
        """
        while not step.has_memory_for(sequences):
            decision = self.preemptor.preempt_for(request)
            if decision is None:
                return
            yield decision
            if request.status is not RequestStatus.RUNNING:
                return
        for sequence in sequences:
            end = sequence.num_computed_tokens + 1
            copies = [] if step.may_write(sequence) else step.reserve(sequence, end)
            assert copies is not None, "the blocks were counted"
            step.run(sequence, 1, copies)
