"""Chunked prefill: decides how many tokens of a prompt one step computes."""

from __future__ import annotations

from baton_engine.scheduling.request import Request
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.step.builder import StepBuilder


class PromptChunks:
    """Divides long prompts into chunks, so that a shorter prompt does not wait for a long one."""

    def __init__(self, state: SchedulerState) -> None:
        self.waiting = state.queues.waiting
        #: Largest chunk while a shorter prompt waits, in tokens. 0: no limit.
        self.threshold = state.config.long_prefill_token_threshold

    def num_tokens(self, step: StepBuilder, sequence: Request) -> int:
        """Return how many tokens of `sequence` to compute in `step`, within the step's budget.

        While a shorter prompt waits, the number is at most `long_prefill_token_threshold`.
        """
        num_tokens = min(sequence.num_uncomputed_tokens, step.budget)
        if 0 < self.threshold < num_tokens and self._shorter_prompt_waits(step, sequence):
            return self.threshold
        return num_tokens

    def _shorter_prompt_waits(self, step: StepBuilder, sequence: Request) -> bool:
        """Return whether another prompt has fewer tokens left to compute than `sequence`.

        The other prompts are those of the first waiting request and of the running sequences in
        `step.prefills`. Running sequences with one token left are not counted.
        """
        num_tokens = sequence.num_uncomputed_tokens
        first = self.waiting.peek()
        return (
            first is not None and first is not sequence and first.num_uncomputed_tokens < num_tokens
        ) or any(
            1 < other.num_uncomputed_tokens < num_tokens  # 1: only its next token is left
            for other in step.prefills
            if other is not sequence
        )
