"""Decisions of the scheduler's collaborators.

They return these values, and `RequestLifecycle` applies them: `Scheduler._apply` selects the method
while a step is built. `RequestLifecycle.settle` applies `Finished` and `Queued` at any time.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_engine.executor.step import BlockCopy
from baton_engine.scheduling.request import Request
from baton_protocol.messages import EngineCoreOutput, ErrorCode, FinishReason


class Admitted(NamedTuple):
    """A request has all blocks it needs to start, and joins the batch."""

    request: Request
    #: The sequence to run: the request itself, or the first beam of its search.
    sequence: Request


class WaitsForPrompt(NamedTuple):
    """A request waits while another one of its group computes their prompt."""

    request: Request


class LoadStarted(NamedTuple):
    """A request has the blocks into which the KV of its prompt is loaded."""

    request: Request
    #: Leading blocks that were in the prefix cache.
    num_cached_blocks: int


class Preempted(NamedTuple):
    """A request loses its KV and queues again."""

    request: Request


class SwappedOut(NamedTuple):
    """Requests lose their device blocks, and keep their KV in host memory."""

    requests: list[Request]
    #: From device blocks to host blocks.
    copies: list[BlockCopy]


class SwappedIn(NamedTuple):
    """Swapped requests have device blocks again, and run from the next step on."""

    requests: list[Request]
    #: From host blocks to device blocks.
    copies: list[BlockCopy]


class Queued(NamedTuple):
    """A request no longer waits for an event, and can run as soon as it has memory."""

    request: Request


class Finished(NamedTuple):
    """A request ends with this output."""

    request: Request
    output: EngineCoreOutput

    @classmethod
    def without_token(
        cls, request: Request, reason: FinishReason, code: ErrorCode | None = None, error: str = ""
    ) -> Finished:
        """End a request with an output that carries no token."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            token_offset=request.num_generated_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
        )
        return cls(request, output)


#: Decisions that are made while a step is built.
Decision = Admitted | WaitsForPrompt | LoadStarted | Preempted | SwappedOut | SwappedIn | Finished
