"""Counts the tokens and steps in flight, and decides whether a request may run ahead of its tokens.

A step is in flight from `Scheduler.schedule` until its results arrive. A token counts as computed
as soon as it is scheduled. If a range ends at the request's last token, the step samples the next
token. Until the result arrives, this token is a placeholder: it counts as one of the request's
tokens, but only the worker has it. With asynchronous scheduling, a placeholder may be scheduled.
The request then runs ahead of the sampled token.

This module is the only writer of `Request.num_placeholders` and `Request.num_in_flight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton_engine.scheduling.request import Request


class ScheduledRange(NamedTuple):
    """The token positions [start, end) of a sequence that one step runs."""

    sequence: Request
    start: int
    end: int
    #: Whether the step samples the token at position `end`.
    samples: bool
    #: `sequence.num_preemptions` when the range was scheduled.
    num_preemptions: int

    @property
    def is_decode(self) -> bool:
        """Whether the range is one generated token. A prompt chunk of one token does not count."""
        return self.end - self.start == 1 and self.start >= self.sequence.num_prompt_tokens


def count_scheduled(sequence: Request, num_tokens: int) -> ScheduledRange:
    """Count the next `num_tokens` tokens of `sequence` as computed by a step in flight."""
    start = sequence.num_computed_tokens
    end = start + num_tokens
    samples = end == len(sequence.token_ids) + sequence.num_placeholders
    sequence.num_computed_tokens = end
    sequence.num_in_flight += 1
    if samples:
        sequence.num_placeholders += 1
    return ScheduledRange(sequence, start, end, samples, sequence.num_preemptions)


def count_returned(entry: ScheduledRange) -> None:
    """Remove a range, whose step has returned, from the in-flight counters of its sequence.

    If the range sampled a token, the caller then appends this token.
    """
    sequence, _, _, samples, _ = entry
    sequence.num_in_flight -= 1
    if samples:
        sequence.num_placeholders -= 1


def count_dropped(entry: ScheduledRange) -> None:
    """Undo `count_scheduled` for a range that has not run, so that a later step runs its tokens."""
    count_returned(entry)
    # A sequence that has been preempted since may have no computed tokens left.
    entry.sequence.num_computed_tokens = min(entry.sequence.num_computed_tokens, entry.start)


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Decides whether a request that has steps in flight may be scheduled in another step."""

    #: Whether a request may be in several steps at once.
    enabled: bool
    max_model_len: int

    def allows(self, request: Request) -> bool:
        """Return whether the next tokens of `request` may run before its steps in flight return.

        If `enabled` is False, no token may run. Otherwise, prompt tokens may run. A placeholder (a
        token that a step in flight will sample) may run, except in two cases:

        - `max_tokens` or `max_model_len` allows no token after the placeholder.
        - The request has a grammar or a KV transfer, which needs the sampled token first.

        If the sampled token ends the request, the results of later steps are ignored.
        """
        if not self.enabled:
            return False
        if not request.num_placeholders:
            return True
        max_tokens, num_tokens = request.sampling_params.max_tokens, request.num_expected_tokens
        return (
            num_tokens < self.max_model_len
            and (max_tokens is None or num_tokens - request.num_prompt_tokens < max_tokens)
            and request.grammar is None
            and request.kv_transfer is None
        )
