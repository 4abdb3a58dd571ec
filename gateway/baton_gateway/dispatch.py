"""One sequence's way through the engines: prefill and decode at the same time, fallback, retry, resume.

The dispatcher owns the sequence and knows every token it has yielded; engines only own work on it. When one goes away, another gets
the prompt and the tokens so far, and the stream goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton_gateway.errors import engine_failure, internal
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.placer import Placer
from baton_gateway.pool import EnginePool, Member
from baton_gateway.sequences import AttemptError, Journey, Placement, Sequence
from baton_protocol.client import EngineClient, EngineDeadError, RequestStream
from baton_protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)

logger = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 60.0
"""A prefill leg without a first token by then is given up. An engine may be alive and still make no progress, and the decode engine
waits for as long as it is told nothing."""
PROMPT_WAIT_S = 10.0
"""Samples that move together wait so long for the first of them to compute their prompt."""

_ELSEWHERE = frozenset(
    {ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.KV_LOAD}
)
"""Failures another engine may not have. Once a sequence has begun none is the client's fault: one engine took it."""


class Dispatcher:
    """Sends sequences through the pool.

    Samples of one prompt that take no prefill leg go to one decode engine as a group: it computes the prompt once and they share
    its blocks. With prefill engines each sample is a leg of its own: the blocks of a leg belong to one transfer between one pair of
    engines, and samples that are spread over decode engines use more than one engine's memory bandwidth. Samples whose engine goes
    away move to one other engine together; one that fails alone goes on alone.

    Args:
        prefill_threshold_tokens: shorter prompts take no prefill leg.
        prefill_timeout_s: how long a prefill leg may take; then the decode engine computes the prompt.
    """

    def __init__(
        self,
        pool: EnginePool,
        placer: Placer,
        metrics: GatewayMetrics,
        *,
        prefill_threshold_tokens: int = 0,
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
    ) -> None:
        self._pool = pool
        self._placer = placer
        self._metrics = metrics
        self._threshold = prefill_threshold_tokens
        self._prefill_timeout_s = prefill_timeout_s

    async def generate(self, sequence: Sequence) -> AsyncGenerator[EngineCoreOutput, None]:
        """Outputs of `sequence` in order, without gap or repeat; the last one is finished with STOP, LENGTH or REPETITION.

        Closing the iterator early aborts the work on the engines.

        Raises:
            APIError: no engine, or none that could bring it to its end.
        """
        journey = Journey(sequence, sequence.data_parallel_rank)
        while not sequence.is_used_up:
            placement = await self._placer.place(journey, with_group=not self._takes_leg(sequence))
            attempt_id = f"{sequence.request_id}-{journey.attempts}"
            journey.sent_to(placement)
            if journey.failure is not None:
                self._count_retry(sequence, journey.failure)
            num_tokens = len(sequence.generated_token_ids)
            try:
                async with aclosing(
                    self._attempt(sequence, placement, attempt_id, journey)
                ) as outputs:
                    async for output in outputs:
                        yield output
                return
            except AttemptError as error:
                journey.gave_up(error, progressed=len(sequence.generated_token_ids) > num_tokens)
                logger.warning(
                    "request %s: engine %s gave up after %d tokens, trying another: %s",
                    sequence.request_id,
                    placement.member.endpoint.name,
                    len(sequence.generated_token_ids),
                    error,
                )
        # Its engine went away between the last token and the word that it was the last.
        yield EngineCoreOutput(sequence.request_id, [], finish_reason=FinishReason.LENGTH)

    def _count_retry(self, sequence: Sequence, failure: AttemptError) -> None:
        self._metrics.retries.labels(failure.reason).inc()
        if sequence.begun:
            self._metrics.resumed.labels(failure.reason).inc()
            self._metrics.replayed_tokens.inc(len(sequence.generated_token_ids))

    def _suits_leg(self, sequence: Sequence) -> bool:
        return sequence.may_take_leg and len(sequence.prompt_token_ids) >= self._threshold

    def _takes_leg(self, sequence: Sequence) -> bool:
        return self._suits_leg(sequence) and bool(self._pool.available("prefill"))

    def _attempt(
        self, sequence: Sequence, placement: Placement, attempt_id: str, journey: Journey
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        decode = placement.member
        if self._takes_leg(sequence):
            prefill = self._pool.pick_prefill(decode)
            if prefill is not None:
                return self._disaggregated(sequence, prefill, decode, attempt_id, journey)
            self._metrics.prefill_fallbacks.labels("no_compatible_engine").inc()
            return self._aggregated(sequence, placement, attempt_id, journey, group_id="")
        if self._suits_leg(sequence) and self._pool.expects("prefill"):
            self._metrics.prefill_fallbacks.labels("no_ready_engine").inc()
        together = sequence.group is not None and placement in sequence.group.placements.values()
        group_id = (
            sequence.group.group_id
            if sequence.group is not None and together and not sequence.begun
            else ""
        )
        return self._aggregated(sequence, placement, attempt_id, journey, group_id=group_id)

    async def _aggregated(
        self,
        sequence: Sequence,
        placement: Placement,
        attempt_id: str,
        journey: Journey,
        *,
        group_id: str,
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """One ADD; the decode engine prefills for itself."""
        client = placement.member.ready_client
        if sequence.begun:
            await self._wait_for_prompt(placement)
        try:
            stream = self._add(
                client, sequence.request(attempt_id, None, group_id=group_id), journey.rank
            )
            async with aclosing(self._rest(sequence, stream)) as outputs:
                async for output in outputs:
                    placement.prompt_known.set()
                    yield output
        finally:
            placement.prompt_known.set()
            client.abort([attempt_id])

    async def _wait_for_prompt(self, placement: Placement) -> None:
        """Lets one of the samples that move together go first: the others find the prompt's blocks in the engine's prefix cache.
        They cannot name a group, whose members all begin at their prompt's end."""
        if not placement.prompt_sent:
            placement.prompt_sent = True
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROMPT_WAIT_S):
                await placement.prompt_known.wait()

    async def _disaggregated(
        self, sequence: Sequence, prefill: Member, decode: Member, attempt_id: str, journey: Journey
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """ADD to both; the first token from P at once, the rest from D."""
        producer, consumer = prefill.ready_client, decode.ready_client
        transfer_id = uuid.uuid4().hex
        consume = KVTransferParams(
            side=KVSide.CONSUME,
            transfer_id=transfer_id,
            peer_instance_id=producer.instance_id,
            remote_host=prefill.endpoint.host,
            remote_port=prefill.endpoint.kv_port,
        )
        produce = KVTransferParams(
            side=KVSide.PRODUCE, transfer_id=transfer_id, peer_instance_id=consumer.instance_id
        )
        rest = self._add(consumer, sequence.request(attempt_id, consume), journey.rank)
        leg: asyncio.Task[EngineCoreOutput] | None = None
        early: asyncio.Task[EngineCoreOutput] | None = None
        try:
            first = self._add_leg(producer, sequence.request(attempt_id, produce))
            leg = asyncio.create_task(_first_output(first))
            early = asyncio.create_task(anext(rest))
            await asyncio.wait(
                [leg, early], timeout=self._prefill_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if (
                early.done() and not leg.done()
            ):  # D refused, failed or is gone, for it has no token to sample yet
                self._check(sequence, _result_or_attempt_error(early))
                raise AttemptError(
                    "the decode engine sent tokens before it knew the first one", ErrorCode.INTERNAL
                )
            result, output = self._leg_result(attempt_id, prefill, leg)
            if output is not None:
                self._check(sequence, output)
                ended = _ends(sequence, output)
                output = msgspec.structs.replace(output, finish_reason=ended)
                sequence.generated_token_ids += output.new_token_ids
                sequence.num_cached_tokens = output.num_cached_tokens
                if ended is None:  # before the yield: a slow reader must not keep D waiting
                    consumer.prefill_result(result)
                yield output
                if ended is not None:
                    return
            else:
                producer.abort(
                    [attempt_id]
                )  # nobody waits for it any more: it must not compute and hold blocks for nothing
                consumer.prefill_result(result)
            async with aclosing(self._rest(sequence, rest, early)) as outputs:
                async for item in outputs:
                    yield item
        finally:
            for task in (leg, early):
                if task is not None and not task.cancel() and not task.cancelled():
                    task.exception()  # looked at, so that asyncio does not log a failure nobody waits for any more
            producer.abort([attempt_id])
            consumer.abort([attempt_id])

    def _leg_result(
        self, attempt_id: str, prefill: Member, leg: asyncio.Task[EngineCoreOutput]
    ) -> tuple[PrefillResult, EngineCoreOutput | None]:
        """What to tell D, and P's token. P's failure is no failure of the request: D computes what is missing."""
        output: EngineCoreOutput | None = None
        try:
            if not leg.done():
                raise TimeoutError
            output = leg.result()
            problem = output.error or (
                "" if output.new_token_ids else "the prefill engine ended without a token"
            )
            outcome = (
                "refused"
                if output.error_code in (ErrorCode.DRAINING, ErrorCode.OVERLOADED)
                else "failed"
            )
        except (EngineDeadError, StopAsyncIteration) as error:
            problem, outcome = str(error) or "the prefill engine ended without a token", "failed"
        except TimeoutError:
            problem, outcome = f"no first token within {self._prefill_timeout_s:g} s", "timed_out"
        if output is not None and not problem:
            self._metrics.prefill_legs.labels("done").inc()
            return PrefillResult(attempt_id, output.new_token_ids), output
        logger.warning(
            "request %s: prefill leg on %s %s: %s",
            attempt_id,
            prefill.endpoint.name,
            outcome,
            problem,
        )
        self._metrics.prefill_legs.labels(outcome).inc()
        self._metrics.prefill_fallbacks.labels(outcome).inc()
        return PrefillResult(attempt_id, error=problem), None

    async def _rest(
        self,
        sequence: Sequence,
        stream: RequestStream,
        first: asyncio.Task[EngineCoreOutput] | None = None,
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """The decode engine's outputs up to the finished one. `first` already waits for the first of them."""
        resumed = sequence.begun and first is None
        while True:
            try:
                output = await (anext(stream) if first is None else first)
            except EngineDeadError as error:
                raise AttemptError(str(error), None) from error
            first = None
            self._check(sequence, output)
            sequence.generated_token_ids += output.new_token_ids
            if (
                not resumed
            ):  # what another engine finds again in its cache was computed for this request before
                sequence.num_cached_tokens = max(
                    sequence.num_cached_tokens, output.num_cached_tokens
                )
            yield output
            if output.finished:
                return

    def _check(self, sequence: Sequence, output: EngineCoreOutput) -> None:
        """Raises what a failed output means, and APIError for one that does not follow the tokens seen so far."""
        if output.finish_reason is FinishReason.ERROR or output.error:
            if output.error_code in _ELSEWHERE or (
                sequence.begun and output.error_code is not None
            ):
                raise AttemptError(output.error, output.error_code)
            raise engine_failure(output.error, output.error_code)
        if output.finish_reason is FinishReason.ABORT:
            raise AttemptError(
                "the engine aborted the request (it is shutting down)", ErrorCode.DRAINING
            )
        expected = len(sequence.generated_token_ids)
        if output.new_token_ids and output.token_offset != expected:
            self._metrics.offset_errors.inc()
            kind = "gap" if output.token_offset > expected else "repeat"
            logger.error(
                "request %s: token %s: expected offset %d, the engine sent %d",
                sequence.request_id,
                kind,
                expected,
                output.token_offset,
            )
            raise internal(
                f"The engine's output has a {kind}: expected token {expected}, got {output.token_offset}."
            )

    def _add(
        self, client: EngineClient, request: EngineCoreRequest, rank: int | None
    ) -> RequestStream:
        request.data_parallel_rank = rank
        try:
            return client.add(request)
        except EngineDeadError as error:  # it died between the pick and the ADD
            raise AttemptError(str(error), None) from error

    def _add_leg(
        self, client: EngineClient, request: EngineCoreRequest
    ) -> RequestStream | EngineDeadError:
        try:
            return client.add(request)
        except EngineDeadError as error:
            return error


async def _first_output(stream: RequestStream | EngineDeadError) -> EngineCoreOutput:
    if isinstance(stream, EngineDeadError):
        raise stream
    return await anext(stream)


def _result_or_attempt_error(task: asyncio.Task[EngineCoreOutput]) -> EngineCoreOutput:
    try:
        return task.result()
    except EngineDeadError as error:
        raise AttemptError(str(error), None) from error


def _ends(sequence: Sequence, output: EngineCoreOutput) -> FinishReason | None:
    """P stops after one token anyway; this is whether that was the request's end."""
    if output.finish_reason in (FinishReason.STOP, FinishReason.REPETITION):
        return output.finish_reason
    generated = len(sequence.generated_token_ids) + len(output.new_token_ids)
    limit = sequence.sampling_params.max_tokens
    return FinishReason.LENGTH if limit is not None and generated >= limit else None
