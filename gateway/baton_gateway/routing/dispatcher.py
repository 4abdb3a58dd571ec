"""Runs one sequence on engines: prefill and decode stages, fallback, retry, resume.

The gateway keeps all generated tokens of the sequence. When an engine is lost, another engine gets
the prompt and these tokens, and the stream continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing

import msgspec

from baton_gateway.errors import APIError, engine_failure, internal
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.placer import Placer
from baton_gateway.routing.pool_member import PoolMember
from baton_gateway.routing.prefill_stage import PrefillStage
from baton_gateway.routing.retry_state import AttemptError, RetryState
from baton_gateway.routing.sequence import Placement, Sequence
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError, RequestStream
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)

logger = logging.getLogger(__name__)

#: Resumed samples wait this long for the first of them to compute their prompt.
PROMPT_WAIT_S = 10.0

#: Failures that are retried on another engine. Once a sequence has tokens, every failure with an
#: error code is retried: an engine has accepted the request, so the request is valid.
_RETRIABLE = frozenset(
    {ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.KV_LOAD}
)


class Dispatcher:
    """Runs sequences on the engines of the pool.

    The samples of one prompt go to one decode engine as a group. Only the first sample may have a
    prefill stage, and all samples share the prompt's KV blocks. So the prompt is computed once, and
    its blocks are transferred once. When the engine is lost, its samples move together to one other
    engine. A sample that fails alone moves alone.

    Args:
        inter_token_timeout_s: longest time between two outputs of a decode engine. After it, the
            sequence moves to another decode engine. 0: no limit.
    """

    def __init__(
        self, placer: Placer, metrics: GatewayMetrics, *, inter_token_timeout_s: float
    ) -> None:
        self._placer = placer
        self._metrics = metrics
        self._inter_token_timeout_s = inter_token_timeout_s or None

    async def generate(self, sequence: Sequence) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the outputs of `sequence` in order, without gap or repetition.

        The last output has the finish reason STOP, LENGTH or REPETITION. Closing the iterator early
        aborts the requests on the engines.

        Raises:
            APIError: no engine is available, or no engine could finish the sequence.
        """
        state = RetryState(sequence, sequence.data_parallel_rank)
        while not sequence.is_complete:
            placement, prefill = await self._placer.place(state)
            attempt_id = f"{sequence.request_id}-{state.num_attempts}"
            state.on_sent(placement)
            if state.last_failure is not None:
                self._count_retry(sequence, state.last_failure)
            num_tokens = len(sequence.generated_token_ids)
            attempt = (
                self._aggregated(state, placement, attempt_id)
                if prefill is None
                else self._disaggregated(state, prefill, placement, attempt_id)
            )
            try:
                async with aclosing(attempt) as outputs:
                    async for output in outputs:
                        yield output
                return
            except AttemptError as error:
                has_progressed = len(sequence.generated_token_ids) > num_tokens
                state.on_failed(error, has_progressed=has_progressed)
                logger.warning(
                    "request %s: engine %s failed after %d tokens, trying another engine: %s",
                    sequence.request_id,
                    placement.member.endpoint.name,
                    len(sequence.generated_token_ids),
                    error,
                )
            except APIError as error:
                logger.error(
                    "request %s failed on engine %s after %d tokens, and the client gets status "
                    "%d: %s",
                    sequence.request_id,
                    placement.member.endpoint.name,
                    len(sequence.generated_token_ids),
                    error.status,
                    error.__cause__ or error,
                )
                raise
        # The engine was lost after it sent the last token, but before it sent the finish reason.
        yield EngineCoreOutput(sequence.request_id, [], finish_reason=FinishReason.LENGTH)

    def _count_retry(self, sequence: Sequence, failure: AttemptError) -> None:
        self._metrics.retries.labels(failure.reason).inc()
        if sequence.has_begun:
            self._metrics.resumed.labels(failure.reason).inc()
            self._metrics.replayed_tokens.inc(len(sequence.generated_token_ids))

    async def _aggregated(
        self, state: RetryState, placement: Placement, attempt_id: str
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the outputs of an attempt that runs only on a decode engine.

        The engine computes the prompt, unless another sample of the group computes or loads it.
        """
        sequence, client = state.sequence, placement.member.ready_client
        if sequence.has_begun and placement.has_sample:
            await _wait_for_prompt(placement)
        placement.has_sample = True
        try:
            request = sequence.request(attempt_id, None, group_id=_group_id(sequence, placement))
            stream = self._add(client, request, state.rank)
            async with aclosing(self._decode_outputs(sequence, placement, stream)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            placement.prompt_computed.set()
            client.abort([attempt_id])

    async def _disaggregated(
        self, state: RetryState, prefill: PoolMember, placement: Placement, attempt_id: str
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the outputs of an attempt on a prefill engine and a decode engine.

        Both engines receive ADD at the same time. The first token comes from the prefill engine,
        all other tokens from the decode engine. In a group, all tokens come from the decode engine.
        The decode engine then loads the prompt's KV for all samples, even if this sample ends with
        its first token.
        """
        sequence, decode = state.sequence, placement.member
        client = decode.ready_client
        placement.has_sample = True
        produce, consume = _transfer(prefill, decode)
        group_id = _group_id(sequence, placement)
        request = sequence.request(attempt_id, consume, group_id=group_id)
        stream = self._add(client, request, state.rank)
        stage = PrefillStage(prefill, sequence.request(attempt_id, produce), stream, self._metrics)
        try:
            first = await self._first_token(sequence, stage, client, request)
            if first is not None:
                yield first
                if first.finished:
                    return
            decoded = self._decode_outputs(sequence, placement, stream, stage.decode_output)
            async with aclosing(decoded) as outputs:
                async for output in outputs:
                    yield output
        finally:
            placement.prompt_computed.set()
            stage.close()
            client.abort([attempt_id])

    async def _first_token(
        self,
        sequence: Sequence,
        stage: PrefillStage,
        client: EngineClient,
        request: EngineCoreRequest,
    ) -> EngineCoreOutput | None:
        """Wait for the prefill stage, send PREFILL_RESULT, and return the first token.

        PREFILL_RESULT is sent before the client of the gateway receives the first token. So a slow
        client does not delay the decode engine. If the sequence ends with the first token,
        PREFILL_RESULT is not sent.

        Args:
            sequence: the sequence, to which the first token is added.
            stage: the prefill stage.
            client: the connection to the decode engine.
            request: the decode engine's request.

        Returns:
            The output with the first token; None if the decode engine samples the first token.

        Raises:
            AttemptError, APIError: the decode engine has failed, or the prefill engine's output is
                invalid.
        """
        if not await stage.wait():
            # The decode engine can only send a failure before it receives PREFILL_RESULT, which
            # carries the first token.
            self._require_continuation(sequence, await _received(stage.decode_output))
            raise AttemptError(
                "the decode engine sent tokens before it received PREFILL_RESULT",
                ErrorCode.INTERNAL,
            )
        output, error = stage.result()
        if output is not None and not request.group_id:
            output = self._add_first_token(sequence, output)
            if not output.finished:
                client.prefill_result(PrefillResult(request.request_id, output.new_token_ids))
            return output
        if output is not None:
            sequence.num_cached_tokens = output.num_cached_tokens
        client.prefill_result(PrefillResult(request.request_id, error=error))
        return None

    def _add_first_token(self, sequence: Sequence, output: EngineCoreOutput) -> EngineCoreOutput:
        """Add the prefill stage's token to the sequence.

        Returns:
            `output` with the sequence's finish reason, which is None if the sequence continues.
        """
        self._require_continuation(sequence, output)
        sequence.generated_token_ids += output.new_token_ids
        sequence.num_cached_tokens = output.num_cached_tokens
        finish_reason = output.finish_reason
        if finish_reason not in (FinishReason.STOP, FinishReason.REPETITION):
            # A prefill engine reports LENGTH after its token in all cases.
            finish_reason = FinishReason.LENGTH if sequence.is_complete else None
        return msgspec.structs.replace(output, finish_reason=finish_reason)

    async def _decode_outputs(
        self,
        sequence: Sequence,
        placement: Placement,
        stream: RequestStream,
        first: asyncio.Task[EngineCoreOutput] | None = None,
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the decode engine's outputs up to the last, and add their tokens to `sequence`.

        Args:
            first: after a prefill stage, a task that already waits for the decode engine's first
                output.
        """
        # After a prefill stage the sequence has a token, but it has not run on another engine.
        is_resumed = sequence.has_begun and first is None
        # The engine may first have to load or recompute the KV cache of the tokens so far.
        timeout_s: float | None = None
        while True:
            output = await _next_output(anext(stream) if first is None else first, timeout_s)
            first, timeout_s = None, self._inter_token_timeout_s
            self._require_continuation(sequence, output)
            sequence.generated_token_ids += output.new_token_ids
            if not is_resumed:  # a resumed sequence may hit blocks that it cached itself
                sequence.num_cached_tokens = max(
                    sequence.num_cached_tokens, output.num_cached_tokens
                )
            placement.prompt_computed.set()
            yield output
            if output.finished:
                return

    def _require_continuation(self, sequence: Sequence, output: EngineCoreOutput) -> None:
        """Raise an error unless `output` succeeded and continues the tokens so far.

        Raises:
            AttemptError: another engine may succeed.
            APIError: the failure is final, or the output leaves out or repeats a token.
        """
        if output.finish_reason is FinishReason.ERROR or output.error:
            failure = AttemptError(output.error, output.error_code)
            if output.error_code in _RETRIABLE or (
                sequence.has_begun and output.error_code is not None
            ):
                raise failure
            error = engine_failure(output.error, output.error_code, sequence.request_id)
            raise error from failure
        if output.finish_reason is FinishReason.ABORT:
            raise AttemptError(
                "the engine aborted the request (it is shutting down)", ErrorCode.DRAINING
            )
        expected = len(sequence.generated_token_ids)
        if output.new_token_ids and output.token_offset != expected:
            self._metrics.offset_errors.inc()
            kind = "gap" if output.token_offset > expected else "repeat"
            raise internal(
                f"The engine's output has a {kind}: expected token {expected}, "
                f"got {output.token_offset}."
            )

    def _add(
        self, client: EngineClient, request: EngineCoreRequest, rank: int | None
    ) -> RequestStream:
        """Send ADD to a decode engine, and return the stream of its outputs.

        Raises:
            AttemptError: the engine is dead.
        """
        request.data_parallel_rank = rank
        try:
            return client.add(request)
        except EngineDeadError as error:  # it died after it was picked
            raise AttemptError(str(error), None) from error


async def _wait_for_prompt(placement: Placement) -> None:
    """Wait until an earlier sample has computed the prompt on the placement's engine.

    A resumed sample then finds the prompt's blocks in the prefix cache. It waits for at most
    PROMPT_WAIT_S. Resumed samples cannot be sent as a group, because all samples of a group start
    right after the prompt.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PROMPT_WAIT_S):
            await placement.prompt_computed.wait()


def _group_id(sequence: Sequence, placement: Placement) -> str:
    """Return the id of the group in which `sequence` is sent to the engine.

    An empty id means that the sequence is sent alone.
    """
    group = sequence.group
    if group is None or sequence.has_begun or placement not in group.placements.values():
        return ""
    return group.group_id


def _transfer(prefill: PoolMember, decode: PoolMember) -> tuple[KVTransferParams, KVTransferParams]:
    """Return the parameters of a new KV transfer, for the prefill engine and the decode engine."""
    transfer_id = uuid.uuid4().hex
    produce = KVTransferParams(
        side=KVSide.PRODUCE,
        transfer_id=transfer_id,
        peer_instance_id=decode.ready_client.instance_id,
    )
    consume = KVTransferParams(
        side=KVSide.CONSUME,
        transfer_id=transfer_id,
        peer_instance_id=prefill.ready_client.instance_id,
        remote_host=prefill.endpoint.host,
        remote_port=prefill.endpoint.kv_port,
    )
    return produce, consume


async def _next_output(
    output: Awaitable[EngineCoreOutput], timeout_s: float | None
) -> EngineCoreOutput:
    """Await and return an output of the decode engine.

    Args:
        timeout_s: longest wait; None: no limit.

    Raises:
        AttemptError: the engine is dead, or has sent no output within `timeout_s`.
    """
    if timeout_s is None:  # `asyncio.timeout` takes a tenth of the gateway's CPU time per token
        return await _received(output)
    try:
        async with asyncio.timeout(timeout_s):
            return await _received(output)
    except TimeoutError:
        raise AttemptError(f"no token within {timeout_s:g} s", None, reason="no_token") from None


async def _received(output: Awaitable[EngineCoreOutput]) -> EngineCoreOutput:
    """Await and return an output of the decode engine.

    Raises:
        AttemptError: the engine is dead.
    """
    try:
        return await output
    except EngineDeadError as error:
        raise AttemptError(str(error), None) from error
