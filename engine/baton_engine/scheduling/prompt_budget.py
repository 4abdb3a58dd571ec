"""Limits the prompt tokens that a step computes beside decodes, to bound the time between tokens.

A long prompt chunk delays the next token of every running sequence. The limit follows the durations
of finished steps, without a model of their cost:

- A step that took longer than the target lowers the limit by the factor target / time. The fewer
  prompt tokens the step had, the less it lowers the limit.
- A step that took less time raises the limit, if it had as many prompt tokens as the limit allows.

The limit falls fast and rises slowly, so that most steps take less than the target.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Smallest and largest factor by which one step changes the limit. A single step may be an outlier.
LARGEST_FALL = 0.5
LARGEST_RISE = 1.1
#: Prompts advance by at least this many tokens per step, even if the target cannot be met.
MIN_PROMPT_TOKENS = 16


@dataclass(slots=True)
class PromptBudget:
    """The limit on the prompt tokens of a step with decodes, and the rules that adjust this limit.

    Attributes:
        target_s: target for the duration of a step in which sequences decode, in seconds.
            0: prompt tokens are not limited.
    """

    target_s: float
    #: Maximum number of prompt tokens in a step with decodes. None: no prompt was computed yet.
    _limit: float | None = None

    def limit(self, budget: int) -> int:
        """Return how many prompt tokens a step with decodes may run, at most `budget`."""
        if not self.target_s or self._limit is None:
            return budget
        return int(min(budget, self._limit))

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Adjust the limit to the duration of a finished step.

        Args:
            num_prompt_tokens: number of prompt tokens that the step computed.
            num_decodes: number of sequences that decoded in the step.
            seconds: duration of the step. With several steps in flight, the duration begins when
                the previous step ends.
        """
        if not self.target_s or not num_prompt_tokens:
            return
        ratio = self.target_s / max(seconds, 1e-9)
        if self._limit is None:
            limit = num_prompt_tokens * ratio
        elif not num_decodes:
            return  # no decode waited for the step
        elif ratio < 1:
            share = min(1.0, num_prompt_tokens / self._limit)
            limit = self._limit * max(LARGEST_FALL, ratio**share)
        elif num_prompt_tokens >= int(self._limit):
            limit = self._limit * min(LARGEST_RISE, ratio)
        else:
            return
        self._limit = max(float(MIN_PROMPT_TOKENS), limit)
