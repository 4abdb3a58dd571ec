"""Planner: gives running requests their tokens in a step, decodes first, then prompt chunks.

Only decodes need memory here, because a prompt gets all its blocks at admission. Decodes get it in
order. A request that is preempted for them comes later in the order, so the step never loses a
request that it already contains.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from baton_engine.executor.step import BlockCopy
from baton_engine.scheduling.decisions import Finished, Preempted, SwappedOut
from baton_engine.scheduling.groups.beams import BeamSearches
from baton_engine.scheduling.preemption import Preemptor
from baton_engine.scheduling.request import BeamGroup, Request
from baton_engine.scheduling.state import SchedulerState
from baton_engine.scheduling.step_builder import StepBuilder
from baton_protocol.messages import ErrorCode, FinishReason


@dataclass(slots=True)
class RunningPlanner:
    """Distributes a step's token budget over the running requests."""

    state: SchedulerState
    preemptor: Preemptor
    beams: BeamSearches
    #: Running requests of this step whose prompt is not computed.
    _prefills: list[Request] = field(default_factory=list, init=False)

    def plan(self, step: StepBuilder) -> Iterator[Preempted | SwappedOut | Finished]:
        """Fill `step` from the running requests.

        The caller applies each decision before the next one.
        """
        prefills = self._prefills
        prefills.clear()
        in_order = self.state.running.in_order
        index = 0
        while index < len(in_order) and step.budget > 0:
            request = in_order[index]
            stays = True
            if request.beams is not None:
                stays = yield from self._plan_beams(step, request, index)
            elif not request.num_in_flight or self._may_follow(request):
                if request.num_uncomputed_tokens > 1:
                    prefills.append(request)
                elif step.may_write(request):
                    step.run(request, 1)
                else:
                    stays = yield from self._plan_growing(step, request, index)
            if stays:  # else the next request has moved to this index
                index += 1
        for sequence in prefills:
            if step.budget == 0:
                break
            # All of them still run: a decode preempts only itself or requests behind it.
            self.run_chunk(step, sequence)

    def run_chunk(self, step: StepBuilder, sequence: Request) -> None:
        """Add as many tokens of `sequence` as the budget allows. It has its blocks already."""
        num_tokens = min(sequence.num_uncomputed_tokens, step.budget)
        threshold = self.state.config.long_prefill_token_threshold
        if 0 < threshold < num_tokens and self._shorter_ones_wait(sequence):
            num_tokens = threshold
        step.run(sequence, num_tokens)

    def _may_follow(self, request: Request) -> bool:
        """Return whether a request can join another step while earlier ones are in flight."""
        return self.state.runs_ahead and (
            not request.num_placeholders or self._may_run_ahead(request)
        )

    def _may_run_ahead(self, request: Request) -> bool:
        """Return whether a token may be computed before the previous one is known."""
        max_tokens = request.sampling_params.max_tokens
        num_tokens = len(request.token_ids) + request.num_placeholders
        return (
            num_tokens < self.state.max_model_len
            and (max_tokens is None or num_tokens - request.num_prompt_tokens < max_tokens)
            and request.grammar is None
            and request.kv_transfer is None
        )

    def _shorter_ones_wait(self, sequence: Request) -> bool:
        num_tokens = sequence.num_uncomputed_tokens
        first = self.state.queues.waiting.peek()
        return (
            first is not None and first is not sequence and first.num_uncomputed_tokens < num_tokens
        ) or any(
            other.num_uncomputed_tokens < num_tokens
            for other in self._prefills
            if other is not sequence
        )

    def _plan_growing(
        self, step: StepBuilder, request: Request, index: int
    ) -> Generator[Preempted | SwappedOut, None, bool]:
        """Run a decode that needs a block. Return False if the request itself was preempted."""
        while (copies := step.reserve(request, request.num_computed_tokens + 1)) is None:
            victim = self.preemptor.find_victim(index)
            if (
                victim in (None, request)
                and (loaded := self.preemptor.find_loaded_victim(request)) is not None
            ):
                yield Preempted(loaded)
                continue
            # It and all requests behind it are PRODUCE requests. It waits for earlier ones to end.
            if victim is None:
                return True
            yield self.preemptor.preempt(victim, beneficiary=request)
            if victim is request:
                return False
        step.run(request, 1, copies)
        return True

    def _plan_beams(
        self, step: StepBuilder, root: Request, index: int
    ) -> Generator[Preempted | SwappedOut | Finished, None, bool]:
        """Run the beams that have not reported, within the budget.

        Returns:
            False if the search was preempted, or ended.
        """
        group = root.beams
        assert group is not None
        beams = [
            beam for beam in group.live if beam.num_uncomputed_tokens > 0 and not beam.num_in_flight
        ]
        if beams and beams[0].num_uncomputed_tokens > 1:  # a single beam that computes its prompt
            self._prefills += beams
            return True
        beams = beams[: step.budget]
        # All or none: a search is preempted as a whole, and then the step must not contain any of
        # its beams.
        while self.beams.num_blocks_needed(beams) > self.state.kv.num_free_blocks:
            victim = self.preemptor.find_victim(index)
            assert victim is not None
            if victim is root and (loaded := self.preemptor.find_loaded_victim(root)) is not None:
                yield Preempted(loaded)
            elif victim is root and self._needs_all_memory(group):
                yield self._out_of_memory(root)
                return False
            else:
                yield self.preemptor.preempt(victim, beneficiary=root)
                if victim is root:
                    return False
        for beam in beams:
            copies: list[BlockCopy] | None = []
            if not step.may_write(beam):
                copies = step.reserve(beam, beam.num_computed_tokens + 1)
                assert copies is not None, "the blocks were counted"
            step.run(beam, 1, copies)
        return True

    def _needs_all_memory(self, group: BeamGroup) -> bool:
        """Return whether all other blocks are free already."""
        own = {block.block_id for beam in group.live for block in beam.blocks}
        return len(own) + self.state.kv.num_free_blocks == self.state.kv.pool.num_blocks

    def _out_of_memory(self, root: Request) -> Finished:
        message = (
            f"beam_width={root.sampling_params.beam_width} has used up all "
            f"{self.state.kv.pool.num_blocks} KV blocks; "
            "use fewer beams, fewer tokens or an engine with more KV memory"
        )
        return Finished.without_token(root, FinishReason.LENGTH, ErrorCode.LENGTH, message)
