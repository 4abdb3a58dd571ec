"""Runs one sequence on engines: prefill and decode stages, fallback, retry, resume.

The gateway keeps all generated tokens of the sequence. When an engine is lost, another engine gets
the prompt and these tokens, and the stream continues.
"""

from __future__ import annotations

import asyncio
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
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError
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

#: Failures that are retried on another engine. Once a sequence has tokens, every failure with an
#: error code is retried: an engine has accepted the request, so the request is valid.
_RETRIABLE = frozenset(
    {ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.KV_LOAD}
)


class Dispatcher:
    """Runs sequences on the engines of the pool.

    `SampleGroup` (`sequence.py`) describes how several samples of one prompt run.

    Args:
        inter_token_timeout_s: longest time in seconds between two outputs of a sequence. If it is
            exceeded, the sequence moves to another decode engine. 0: no limit.
    """

    def __init__(
        self, placer: Placer, metrics: GatewayMetrics, *, inter_token_timeout_s: float
    ) -> None:
        self._placer = placer
        self._metrics = metrics
        self._inter_token_timeout_s = inter_token_timeout_s or None

    async def generate(self, sequence: Sequence) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the outputs of `sequence` in order. No token is missing or repeated.

        The last output has the finish reason STOP, LENGTH or REPETITION. Closing the iterator early
        aborts the requests on the engines.

        Raises:
            APIError: no engine is available, an engine refuses the sequence, or all attempts fail.
        """
        state = RetryState(sequence, sequence.data_parallel_rank)
        while not sequence.is_complete:
            placement, prefill = await self._placer.place(state)
            attempt = self._attempt(
                state, placement, prefill, f"{sequence.request_id}-{state.num_attempts}"
            )
            state.on_sent(placement)
            if state.last_failure is not None:
                self._count_retry(sequence, state.last_failure)
            num_tokens = len(sequence.generated_token_ids)
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

    async def _attempt(
        self,
        state: RetryState,
        placement: Placement,
        prefill: PoolMember | None,
        attempt_id: str,
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield the outputs of one attempt, and add their tokens to the sequence.

        With a prefill engine, both engines receive the message ADD at the same time. The prefill
        engine samples the first token, unless the sequence is sent with a sample group. The decode
        engine samples all other tokens. Closing the iterator early aborts the requests on both
        engines.

        Raises:
            AttemptError: an engine failed, and another engine may succeed.
            APIError: the failure is final.
        """
        sequence, decode = state.sequence, placement.member
        client, is_resumed = decode.ready_client, sequence.has_begun
        produce, consume = (None, None) if prefill is None else _transfer(prefill, decode)
        group_id = await placement.join(sequence)
        request = sequence.request(attempt_id, consume, group_id=group_id)
        request.data_parallel_rank = state.rank
        stage: PrefillStage | None = None
        try:
            stream = client.add(request)
            if prefill is not None:
                stage = PrefillStage(
                    prefill, sequence.request(attempt_id, produce), stream, self._metrics
                )
                first = await self._first_token(sequence, stage, client, request)
                if first is not None:
                    yield first
                    if first.finished:
                        return
            arriving = anext(stream) if stage is None else stage.decode_output
            # The engine may first have to load or recompute the KV cache of the tokens so far.
            timeout_s: float | None = None
            while True:
                output = await _next_output(arriving, timeout_s)
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
                arriving, timeout_s = anext(stream), self._inter_token_timeout_s
        except EngineDeadError as error:
            raise AttemptError(str(error), None) from error
        finally:
            placement.prompt_computed.set()
            if stage is not None:
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

        PREFILL_RESULT is sent to the decode engine before the first token is returned. So a slow
        client of the gateway does not delay the engine. If the sequence ends with the first token,
        PREFILL_RESULT is not sent.

        Args:
            sequence: the sequence, to which the first token is added.
            stage: the prefill stage.
            client: the connection to the decode engine.
            request: the decode engine's request.

        Returns:
            The output with the first token, whose finish reason is None if the sequence continues.
            None if the decode engine samples the first token.

        Raises:
            EngineDeadError: the decode engine is dead.
            AttemptError, APIError: the decode engine has failed, or the prefill engine's output is
                invalid.
        """
        if not await stage.wait():
            # Before PREFILL_RESULT, the decode engine can only send a failure.
            self._require_continuation(sequence, await stage.decode_output)
            raise AttemptError(
                "the decode engine sent tokens before it received PREFILL_RESULT",
                ErrorCode.INTERNAL,
            )
        output, error = stage.result()
        if output is not None:
            sequence.num_cached_tokens = output.num_cached_tokens
        if output is None or request.group_id:
            client.prefill_result(PrefillResult(request.request_id, error=error))
            return None
        self._require_continuation(sequence, output)
        sequence.generated_token_ids += output.new_token_ids
        finish_reason = output.finish_reason
        if finish_reason not in (FinishReason.STOP, FinishReason.REPETITION):
            # A prefill engine reports LENGTH after its token in all cases.
            finish_reason = FinishReason.LENGTH if sequence.is_complete else None
        if finish_reason is None:
            client.prefill_result(PrefillResult(request.request_id, output.new_token_ids))
        return msgspec.structs.replace(output, finish_reason=finish_reason)

    def _require_continuation(self, sequence: Sequence, output: EngineCoreOutput) -> None:
        """Raise an error if `output` is a failure or does not continue the generated tokens.

        Raises:
            AttemptError: the engine failed, and another engine may succeed.
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
                "the engine aborted the request: it shuts down, pauses or sleeps",
                ErrorCode.DRAINING,
            )
        expected = len(sequence.generated_token_ids)
        if output.new_token_ids and output.token_offset != expected:
            self._metrics.offset_errors.inc()
            kind = "gap" if output.token_offset > expected else "repeat"
            raise internal(
                f"The engine's output has a {kind}: expected token {expected}, "
                f"got {output.token_offset}."
            )


def _transfer(prefill: PoolMember, decode: PoolMember) -> tuple[KVTransferParams, KVTransferParams]:
    """Return the KV transfer parameters for the prefill engine, and for the decode engine."""
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
    arriving: Awaitable[EngineCoreOutput], timeout_s: float | None
) -> EngineCoreOutput:
    """Await and return an output of the decode engine.

    Args:
        timeout_s: longest wait; None: no limit.

    Raises:
        EngineDeadError: the engine is dead.
        AttemptError: the engine has sent no output within `timeout_s`.
    """
    if timeout_s is None:  # `asyncio.timeout` takes a tenth of the gateway's CPU time per token
        return await arriving
    try:
        async with asyncio.timeout(timeout_s):
            return await arriving
    except TimeoutError:
        raise AttemptError(f"no token within {timeout_s:g} s", None, reason="no_token") from None
