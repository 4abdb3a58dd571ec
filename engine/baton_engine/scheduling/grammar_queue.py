"""Compiles the grammars of structured outputs, and holds requests that wait for a grammar."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from baton_engine.executor.step import GrammarOutput
from baton_engine.grammar.structured_output import Grammar, StructuredOutputManager
from baton_engine.scheduling.decisions import Finished, LazyDecisions, Queued
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import ErrorCode, FinishReason

logger = logging.getLogger(__name__)


class GrammarQueue:
    """Compiles the grammars of requests, and holds requests that wait for their grammar."""

    def __init__(self, manager: StructuredOutputManager | None) -> None:
        """Create an empty queue.

        Args:
            manager: compiles grammars. If None, requests with structured outputs are refused.
        """
        self._manager = manager
        self._futures: dict[str, Future[Grammar]] = {}
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def compile(self, request: Request) -> None:
        """Start to compile the grammar of a request, if the request has structured outputs.

        Raises:
            ValueError: the request has structured outputs, and this engine does not support them.
        """
        spec = request.sampling_params.structured_output
        if spec is None:
            return
        if self._manager is None:
            raise ValueError(
                "structured_output is not available in this engine; send the request without it"
            )
        self._futures[request.request_id] = self._manager.compile(spec, request.cache_salt)

    def must_wait(self, request: Request) -> bool:
        """Return whether the request's grammar is still being compiled."""
        return request.request_id in self._futures

    def wait(self, request: Request) -> None:
        """Hold a request until its grammar is compiled."""
        self._waiting[request.request_id] = request

    def discard(self, request: Request) -> None:
        """Remove a request, and cancel the compilation of its grammar if still possible."""
        future = self._futures.pop(request.request_id, None)
        if future is not None:
            future.cancel()
        self._waiting.pop(request.request_id, None)

    def take_compiled(self) -> LazyDecisions[Finished | Queued]:
        """Remove the requests whose compilation has ended, and yield the decision for each.

        A request ends if the compilation failed, or if its generated tokens violate or complete
        the grammar. Otherwise, the request is queued.
        """
        for request in list(self._waiting.values()):
            future = self._futures[request.request_id]
            if future.done():
                self.discard(request)
                yield _end_compilation(request, future)

    def bitmask(self, grammars: dict[str, Grammar]) -> GrammarOutput | None:
        """Return bitmasks of the next tokens that each grammar allows. None if `grammars` is empty.

        Args:
            grammars: grammar by request id.
        """
        if not grammars:
            return None
        assert self._manager is not None
        return GrammarOutput(list(grammars), self._manager.bitmask(list(grammars.values())))


def _end_compilation(request: Request, future: Future[Grammar]) -> Finished | Queued:
    """Set the compiled grammar of a request. Return the decision to queue or end the request.

    If the compilation failed, no grammar is set, and the request ends.

    Args:
        future: the completed compilation.
    """
    error = future.exception()
    if error is None:
        request.grammar = future.result()
        if not accept_tokens(request):
            message = "the generated_token_ids contradict structured_output"
        elif request.grammar.is_terminated:
            return Finished.without_token(request, FinishReason.STOP)
        else:
            return Queued(request)
    elif isinstance(error, ValueError):
        message = str(error)
    else:  # for example a panic of the parser; only this request ends, and the engine continues
        logger.error(
            "request %s ends with an error, because its grammar cannot be compiled",
            request.request_id,
            exc_info=error,
        )
        message = (
            "structured_output cannot be compiled; the engine's log has the reason "
            f"under the id {request.request_id}"
        )
    return Finished.without_token(request, FinishReason.ERROR, ErrorCode.INVALID, message)


def accept_tokens(request: Request) -> bool:
    """Advance the request's grammar over the generated tokens not yet passed to the grammar.

    Returns:
        Whether the grammar accepts these tokens. True for a request without a grammar.
    """
    grammar = request.grammar
    if grammar is None:
        return True
    token_ids = request.token_ids[request.num_prompt_tokens + request.num_grammar_tokens :]
    request.num_grammar_tokens += len(token_ids)
    return not token_ids or grammar.accept(token_ids)
