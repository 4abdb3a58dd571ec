"""Decisions that the scheduler's collaborators return. They change no state until they are applied.

`Scheduler._apply` applies the decisions that fill a step. `Scheduler._settle` applies the decisions
that follow from results of steps, KV loads and grammar compilations: `Finished` and `Queued`. These
need no step under construction. `RequestLifecycle` has one method for each type of decision.

There is no decision to run a token: `Scheduler` adds tokens to the step itself. One decision for
each decoded token made the engine core take 20 % more time per request and step
(`benchmarks/engine/overhead.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from baton_engine.kv_cache.kv_cache_manager import CachedBlock
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import EngineCoreOutput, ErrorCode, FinishReason


class Admitted(NamedTuple):
    """A request joins the batch. It was waiting, or its KV has been loaded from a peer.

    Enough blocks are free for all its tokens.
    """

    request: Request
    #: Leading blocks that are in the prefix cache.
    cached: Sequence[CachedBlock] = ()
    #: Request of the same `SampleGroup` whose prompt blocks `request` shares, or None.
    source: Request | None = None


class WaitsForPrompt(NamedTuple):
    """A request waits until another request of its `SampleGroup` has the KV of their prompt."""

    request: Request


class LoadStarted(NamedTuple):
    """A request starts to load the KV of its prompt from a peer.

    Enough blocks are free for all its tokens.
    """

    request: Request
    #: Leading blocks that are in the prefix cache.
    cached: list[CachedBlock]


class Preempted(NamedTuple):
    """A request loses its KV blocks and is queued again."""

    request: Request


class SwappedOut(NamedTuple):
    """Requests lose their device blocks, and their KV moves to host memory."""

    requests: list[Request]


class SwappedIn(NamedTuple):
    """Swapped requests get device blocks again. They can run from the next step on."""

    requests: list[Request]


class Queued(NamedTuple):
    """A request's wait has ended, and the request is queued to run.

    The request has waited for KV from a peer, for its compiled grammar, for the prompt's KV in its
    `SampleGroup`, or for the end of its own steps in flight.
    """

    request: Request


class Finished(NamedTuple):
    """A request ends, and `output` is its last output."""

    request: Request
    output: EngineCoreOutput

    @classmethod
    def without_token(
        cls, request: Request, reason: FinishReason, code: ErrorCode | None = None, error: str = ""
    ) -> Finished:
        """Build the decision to end a request with an output that has no tokens.

        Args:
            code: kind of the error. None: the request ends without an error.
            error: message for the client; empty without an error.
        """
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            token_offset=request.num_generated_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
        )
        return cls(request, output)


_Decision = TypeVar("_Decision")

#: Decisions that are computed one at a time. The caller applies each decision before it takes the
#: next one, because the next one depends on the changed state.
LazyDecisions = Iterator[_Decision]

#: Decisions that fill a step.
Decision = Admitted | WaitsForPrompt | LoadStarted | Preempted | SwappedOut | SwappedIn | Finished
