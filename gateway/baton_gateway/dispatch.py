"""One sequence's way through the engines: prefill and decode at the same time, fallback, retry, resume.

The dispatcher owns the sequence and knows every token it has yielded; engines only own work on it. When one goes away, another gets
the prompt and the tokens so far, and the stream goes on.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from baton_engine.protocol.client import EngineClient, EngineDeadError, RequestStream
from baton_engine.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_engine.protocol.sampling import SamplingParams
from baton_gateway.errors import APIError, engine_failure, internal, unavailable
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.pool import EnginePool, Member

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Decode engines one sequence is sent to before its failure is the answer."""
RESUME_WAIT_S = 30.0
"""A sequence that has begun waits this long for an engine that can continue it: a pod may be restarting."""
PREFILL_TIMEOUT_S = 60.0
"""A prefill leg without a first token by then is given up. An engine may be alive and still make no progress, and the decode engine
waits for as long as it is told nothing."""

_ELSEWHERE = frozenset({ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.KV_LOAD})
"""Failures another engine may not have."""


@dataclass
class SampleGroup:
    """Samples of one prompt. The first that is sent off picks the engine for all, which computes the prompt once."""

    group_id: str
    member: Member | None = None


@dataclass
class Sequence:
    """One sample of one prompt, and what has been generated of it. A beam search is one sequence whose output has beams."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """With max_tokens and seed set."""
    sample_index: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    group: SampleGroup | None = None
    """None: it is alone."""
    generated_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    failure: str = ""
    """Why the last engine gave it up; it waits for another one, or runs there."""

    @property
    def may_take_leg(self) -> bool:
        """Whether another engine may compute its prompt and sample its first token. Beams share blocks and are chosen in one
        place, and a prompt's logprobs are needed where the answer is made; one that goes on elsewhere has no leg either."""
        params = self.sampling_params
        return not self.generated_token_ids and not params.beam_width and params.prompt_logprobs is None


class _AttemptError(Exception):
    """This decode engine cannot go on; another may."""

    def __init__(self, message: str, code: ErrorCode | None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def reason(self) -> str:
        return "engine_lost" if self.code is None else self.code.name.lower()


class Dispatcher:
    """Sends sequences through the pool.

    Samples of one prompt that take no prefill leg go to one decode engine as a group: it computes the prompt once and they share
    its blocks. With prefill engines each sample is a leg of its own: the blocks of a leg belong to one transfer between one pair of
    engines, and samples that are spread over decode engines use more than one engine's memory bandwidth. A sample whose engine
    fails goes on alone.

    Args:
        prefill_threshold_tokens: shorter prompts take no prefill leg.
        resume_wait_s: how long a sequence whose engine was lost waits for another one.
        prefill_timeout_s: how long a prefill leg may take; then the decode engine computes the prompt.
    """

    def __init__(
        self,
        pool: EnginePool,
        metrics: GatewayMetrics,
        *,
        prefill_threshold_tokens: int = 0,
        resume_wait_s: float = RESUME_WAIT_S,
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._threshold = prefill_threshold_tokens
        self._resume_wait_s = resume_wait_s
        self._prefill_timeout_s = prefill_timeout_s

    async def generate(self, sequence: Sequence) -> AsyncGenerator[EngineCoreOutput, None]:
        """Outputs of `sequence` in order, without gap or repeat; the last one is finished with STOP, LENGTH or REPETITION.

        Closing the iterator early aborts the work on the engines.

        Raises:
            APIError: no engine, or none that could bring it to its end.
        """
        excluded: set[str] = set()
        config_hash: str | None = None
        failure: _AttemptError | None = None
        for attempt in range(MAX_ATTEMPTS):
            decode = self._group_member(sequence) if failure is None else None
            grouped = decode is not None
            if decode is None:
                decode = await self._next_decode(sequence, excluded, config_hash, failure)
            config_hash = decode.ready_client.init.config_hash
            excluded.add(decode.ready_client.instance_id)
            if failure is not None:
                self._metrics.retries.labels(failure.reason).inc()
                if sequence.generated_token_ids:
                    self._metrics.resumed.inc()
            try:
                async with aclosing(self._attempt(sequence, decode, attempt, grouped=grouped)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except _AttemptError as error:
                failure = error
                sequence.failure = str(error)
                logger.warning(
                    "request %s: engine %s gave up after %d tokens, trying another: %s",
                    sequence.request_id,
                    decode.endpoint.name,
                    len(sequence.generated_token_ids),
                    error,
                )
        assert failure is not None
        raise self._final(sequence, failure)

    def _group_member(self, sequence: Sequence) -> Member | None:
        """The engine of the sequence's group, if it is to go with it."""
        group = sequence.group
        if group is None or self._wants_leg(sequence):
            return None
        if group.member is None:
            group.member = self._pool.pick_decode()
        if group.member is None or not group.member.available:
            return None
        return group.member

    def _wants_leg(self, sequence: Sequence) -> bool:
        long_enough = len(sequence.prompt_token_ids) >= self._threshold
        return sequence.may_take_leg and long_enough and bool(self._pool.available("prefill"))

    async def _next_decode(
        self, sequence: Sequence, excluded: set[str], config_hash: str | None, failure: _AttemptError | None
    ) -> Member:
        # Until a token was seen nothing is owed to this version of the model: any decode engine will do.
        same = config_hash if sequence.generated_token_ids else None
        lost = failure is not None and failure.code is None
        stopping = failure is not None and failure.code is ErrorCode.DRAINING and bool(sequence.generated_token_ids)
        if lost or stopping:  # a successor may be starting
            member = await self._pool.wait_decode(self._resume_wait_s, excluded=excluded, config_hash=same)
        else:
            member = self._pool.pick_decode(excluded=excluded, config_hash=same)
        if member is not None:
            return member
        if failure is None:
            raise unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
        raise self._final(sequence, failure)

    def _final(self, sequence: Sequence, failure: _AttemptError) -> APIError:
        logger.error("request %s failed: %s", sequence.request_id, failure)
        if failure.code is None:
            return unavailable(f"The engine serving this request was lost, and no other took it over: {failure}")
        return engine_failure(str(failure), failure.code)

    def _attempt(
        self, sequence: Sequence, decode: Member, attempt: int, *, grouped: bool
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        attempt_id = f"{sequence.request_id}-{attempt}"
        if not grouped and self._wants_leg(sequence):
            prefill = self._pool.pick_prefill(decode)
            if prefill is not None:
                return self._disaggregated(sequence, prefill, decode, attempt_id)
            self._metrics.prefill_fallbacks.labels("no_compatible_engine").inc()
        return self._aggregated(sequence, decode, attempt_id, grouped=grouped)

    async def _aggregated(
        self, sequence: Sequence, decode: Member, attempt_id: str, *, grouped: bool
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """One ADD; the decode engine prefills for itself."""
        client = decode.ready_client
        stream = self._add(client, self._request(sequence, attempt_id, None, grouped=grouped))
        try:
            async with aclosing(self._rest(sequence, stream)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            client.abort([attempt_id])

    async def _disaggregated(
        self, sequence: Sequence, prefill: Member, decode: Member, attempt_id: str
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
        produce = KVTransferParams(side=KVSide.PRODUCE, transfer_id=transfer_id, peer_instance_id=consumer.instance_id)
        rest = self._add(consumer, self._request(sequence, attempt_id, consume))
        leg: asyncio.Task[EngineCoreOutput] | None = None
        early: asyncio.Task[EngineCoreOutput] | None = None
        try:
            first = self._add_leg(producer, self._request(sequence, attempt_id, produce))
            leg = asyncio.create_task(_first_output(first))
            early = asyncio.create_task(anext(rest))
            await asyncio.wait([leg, early], timeout=self._prefill_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if early.done() and not leg.done():  # D refused, failed or is gone, for it has no token to sample yet
                self._check(sequence, _result_or_attempt_error(early))
                raise _AttemptError("the decode engine sent tokens before it knew the first one", ErrorCode.INTERNAL)
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
            problem = output.error or ("" if output.new_token_ids else "the prefill engine ended without a token")
            outcome = "refused" if output.error_code in (ErrorCode.DRAINING, ErrorCode.OVERLOADED) else "failed"
        except (EngineDeadError, StopAsyncIteration) as error:
            problem, outcome = str(error) or "the prefill engine ended without a token", "failed"
        except TimeoutError:
            problem, outcome = f"no first token within {self._prefill_timeout_s:g} s", "timed_out"
        if output is not None and not problem:
            self._metrics.prefill_legs.labels("done").inc()
            return PrefillResult(attempt_id, output.new_token_ids), output
        logger.warning("request %s: prefill leg on %s %s: %s", attempt_id, prefill.endpoint.name, outcome, problem)
        self._metrics.prefill_legs.labels(outcome).inc()
        self._metrics.prefill_fallbacks.labels(outcome).inc()
        return PrefillResult(attempt_id, error=problem), None

    async def _rest(
        self, sequence: Sequence, stream: RequestStream, first: asyncio.Task[EngineCoreOutput] | None = None
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """The decode engine's outputs up to the finished one. `first` already waits for the first of them."""
        while True:
            try:
                output = await (anext(stream) if first is None else first)
            except EngineDeadError as error:
                raise _AttemptError(str(error), None) from error
            first = None
            self._check(sequence, output)
            sequence.generated_token_ids += output.new_token_ids
            sequence.num_cached_tokens = max(sequence.num_cached_tokens, output.num_cached_tokens)
            yield output
            if output.finished:
                return

    def _check(self, sequence: Sequence, output: EngineCoreOutput) -> None:
        """Raises what a failed output means, and APIError for one that does not follow the tokens seen so far."""
        if output.finish_reason is FinishReason.ERROR or output.error:
            if output.error_code in _ELSEWHERE:
                raise _AttemptError(output.error, output.error_code)
            raise engine_failure(output.error, output.error_code)
        if output.finish_reason is FinishReason.ABORT:
            raise _AttemptError("the engine aborted the request (it is shutting down)", ErrorCode.DRAINING)
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
            raise internal(f"The engine's output has a {kind}: expected token {expected}, got {output.token_offset}.")

    def _add(self, client: EngineClient, request: EngineCoreRequest) -> RequestStream:
        try:
            return client.add(request)
        except EngineDeadError as error:  # it died between the pick and the ADD
            raise _AttemptError(str(error), None) from error

    def _add_leg(self, client: EngineClient, request: EngineCoreRequest) -> RequestStream | EngineDeadError:
        try:
            return client.add(request)
        except EngineDeadError as error:
            return error

    def _request(
        self, sequence: Sequence, attempt_id: str, kv: KVTransferParams | None, *, grouped: bool = False
    ) -> EngineCoreRequest:
        params = sequence.sampling_params
        if sequence.generated_token_ids and params.prompt_logprobs is not None:  # they came with the first token
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        if kv is not None and kv.side is KVSide.PRODUCE:
            one_token = len(sequence.generated_token_ids) + 1
            params = msgspec.structs.replace(params, max_tokens=one_token, min_tokens=min(params.min_tokens, one_token))
        return EngineCoreRequest(
            request_id=attempt_id,
            prompt_token_ids=sequence.prompt_token_ids,
            sampling_params=params,
            generated_token_ids=list(sequence.generated_token_ids),
            sample_index=sequence.sample_index,
            arrival_time=sequence.arrival_time,
            priority=sequence.priority,
            cache_salt=sequence.cache_salt,
            kv_transfer=kv,
            group_id=sequence.group.group_id if grouped and sequence.group is not None else "",
        )


async def _first_output(stream: RequestStream | EngineDeadError) -> EngineCoreOutput:
    if isinstance(stream, EngineDeadError):
        raise stream
    return await anext(stream)


def _result_or_attempt_error(task: asyncio.Task[EngineCoreOutput]) -> EngineCoreOutput:
    try:
        return task.result()
    except EngineDeadError as error:
        raise _AttemptError(str(error), None) from error


def _ends(sequence: Sequence, output: EngineCoreOutput) -> FinishReason | None:
    """P stops after one token anyway; this is whether that was the request's end."""
    if output.finish_reason in (FinishReason.STOP, FinishReason.REPETITION):
        return output.finish_reason
    generated = len(sequence.generated_token_ids) + len(output.new_token_ids)
    limit = sequence.sampling_params.max_tokens
    return FinishReason.LENGTH if limit is not None and generated >= limit else None
