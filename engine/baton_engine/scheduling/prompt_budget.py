"""Limits the prompt tokens that a step computes beside decodes, to bound the time between tokens.

A long prompt chunk delays the next token of every running sequence. The limit is the number of
prompt tokens that fit into the target time, estimated from the times of earlier steps:

    seconds of a step ~ seconds of a step of decodes + prompt tokens * seconds per prompt token

Both terms are exponential moving averages. Costs that the model leaves out, such as a larger batch,
raise the estimate per prompt token, so that the next limit is lower.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the newest step in the averages.
NEWEST = 0.3
#: Prompts advance by at least this many tokens per step, even if the target cannot be met.
MIN_PROMPT_TOKENS = 16


@dataclass(slots=True)
class PromptBudget:
    """The limit of one engine.

    Attributes:
        target_s: wanted seconds between two tokens of a sequence. 0: no limit.
    """

    target_s: float
    #: Average seconds of a step of decodes.
    _decode_s: float = 0.0
    #: Average seconds that a prompt token adds to a step. None: no prompt was computed yet.
    _token_s: float | None = None

    def limit(self, budget: int) -> int:
        """Return how many tokens of `budget` may be prompt tokens, in a step with decodes."""
        if not self.target_s or self._token_s is None:
            return budget
        fitting = (self.target_s - self._decode_s) / max(self._token_s, 1e-9)
        return min(budget, max(MIN_PROMPT_TOKENS, int(fitting)))

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a finished step.

        Args:
            num_prompt_tokens: prompt tokens that the step computed; 0 for a step of decodes.
            seconds: time from the end of the step before, or from the start, until the step ended.
        """
        if num_prompt_tokens:
            sample = max(0.0, seconds - self._decode_s) / num_prompt_tokens
            before = sample if self._token_s is None else self._token_s
            self._token_s = before + NEWEST * (sample - before)
        else:
            before = self._decode_s or seconds
            self._decode_s = before + NEWEST * (seconds - before)
