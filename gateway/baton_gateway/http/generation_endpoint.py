"""The base class of both generation endpoints: admission, complete responses, streams.

A subclass converts outputs to the JSON of its API.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import CLIENT, client_name
from baton_gateway.access.scale_from_zero_queue import ScaleFromZeroQueue
from baton_gateway.errors import APIError, bad_request, check_model, timed_out
from baton_gateway.http.body_budget import BodyBudget, BodyCharge
from baton_gateway.http.event_stream import EventStream
from baton_gateway.http.request_body import UnknownFields, parse_body
from baton_gateway.http.slow_clients import abort_if_unread, send_json
from baton_gateway.requests.generation import Generator
from baton_gateway.requests.job import Choice, Job
from baton_gateway.requests.job_builder import JobBuilder
from baton_gateway.thread_pool import run_off_loop
from baton_text.errors import RequestError
from baton_text.output import TextOutput
from baton_text.replies.reply_parser import ReplyDelta
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.generation_request import GenerationRequest

logger = logging.getLogger(__name__)

#: nginx's status for a client that disconnected. Metrics count it, but it is never sent.
CLIENT_CLOSED_REQUEST = 499

#: Header with the same meaning as the field data_parallel_rank of the body.
DATA_PARALLEL_RANK = "X-Data-Parallel-Rank"
_RANK = re.compile("[0-9]{1,9}")

#: Status that metrics count for a stream that began with 200 and failed later.
FINAL_STATUS = web.RequestKey("final_status", int)

#: Limit on the tokens and log-probabilities of a response or chunk that is encoded on the event
#: loop. A larger one is encoded in a thread.
INLINE_ENTRIES = 1024

_Request = TypeVar("_Request", ChatCompletionRequest, CompletionRequest)
_Events = AsyncGenerator[tuple[Choice, TextOutput], None]


class GenerationEndpoint(abc.ABC, Generic[_Request]):
    """An endpoint that generates text.

    Args:
        queue: holds requests while the service has no engine.
        request_timeout_s: longest time from a request's arrival to the end of its response. The
            time in `queue` does not count. 0: no limit.
        client_timeout_s: longest time for a client to send a body, or to read a response or one
            event of a stream.
    """

    kind: type[_Request]

    def __init__(
        self,
        builder: JobBuilder,
        generator: Generator,
        admission: Admission,
        queue: ScaleFromZeroQueue,
        bodies: BodyBudget,
        unknown_fields: UnknownFields,
        *,
        served_name: str,
        request_timeout_s: float,
        client_timeout_s: float,
    ) -> None:
        self._builder = builder
        self._generator = generator
        self._tokenizer = builder.tokenizer
        self._admission = admission
        self._queue = queue
        self._bodies = bodies
        self._unknown_fields = unknown_fields
        self.served_name = served_name
        self._timeout_s = request_timeout_s or math.inf
        self._client_timeout_s = client_timeout_s
        self._encode = msgspec.json.Encoder().encode

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Serve one request and return the response.

        Raises:
            APIError, RequestError: the request failed before the first byte of the response.
        """
        started = time.monotonic()
        self._admission.check_open()
        self._admission.begin()
        try:
            return await self._serve(http, started)
        finally:
            self._admission.end()

    async def _serve(self, http: web.Request, started: float) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        stream: EventStream | None = None
        with self._admission.place(http.get(CLIENT)) as place:
            try:
                async with self._bodies.charge() as charge:
                    request, body_size = await self._read(http, charge)
                    # Before the prompts are tokenized, so that a refusal takes little time.
                    place.resize(request.num_sequences)
                    stream = EventStream(
                        http,
                        is_wanted=bool(request.stream),
                        client_timeout_s=self._client_timeout_s,
                    )
                    held_at = clock()
                    await self._queue.wait(stream.keep_alive)
                    deadline += clock() - held_at
                    async with self._until(deadline):
                        job = await self._builder.build(
                            request, started, body_size, http.get(CLIENT)
                        )
                on_output = partial(abort_if_unread, http, f"request {job.id}", len(job.choices))
                async with aclosing(self._generator.run(job, on_output)) as events:
                    if request.stream:
                        return await self._stream(http, request, job, events, deadline, stream)
                    return await self._answer(http, request, job, events, deadline)
            except (RequestError, APIError) as failure:
                if stream is None or not stream.is_open:
                    raise
                error = bad_request(failure) if isinstance(failure, RequestError) else failure
                http[FINAL_STATUS] = error.status
                with suppress(ConnectionError):
                    await stream.fail(self._encode(error.body))
                return await stream.open()

    async def _read(self, http: web.Request, charge: BodyCharge) -> tuple[_Request, int]:
        """Return the request and the size of its body in bytes.

        Raises:
            APIError, RequestError: the headers or the body are invalid, the body does not arrive in
                time, or the request names another model.
        """
        if http.content_type != "application/json":
            message = f"Content-Type must be application/json, got {http.content_type!r}."
            raise APIError(415, message, code="unsupported_media_type")
        body = await charge.read(http, min(self._timeout_s, self._client_timeout_s))
        max_model_len = self._builder.max_model_len
        request = await parse_body(body, self.kind, max_model_len, self._unknown_fields)
        request.data_parallel_rank = _data_parallel_rank(http, request.data_parallel_rank)
        check_model(request.model, self.served_name)
        return request, len(body)

    async def _answer(
        self, http: web.Request, request: _Request, job: Job, events: _Events, deadline: float
    ) -> web.Response:
        outputs: dict[int, list[TextOutput]] = {id(choice): [] for choice in job.choices}
        async with self._until(deadline):
            async for choice, output in events:
                outputs[id(choice)].append(output)

        def body() -> bytes:
            merged = [(choice, _merge(outputs[id(choice)])) for choice in job.best_choices()]
            return msgspec.json.encode(self.response(request, job, merged))

        encoded = await run_off_loop(body, job.num_entries, INLINE_ENTRIES)
        left_s = deadline - asyncio.get_running_loop().time()
        return await send_json(http, encoded, min(left_s, self._client_timeout_s))

    async def _stream(
        self,
        http: web.Request,
        request: _Request,
        job: Job,
        events: _Events,
        deadline: float,
        stream: EventStream,
    ) -> web.StreamResponse:
        async with self._until(deadline):
            # An earlier failure is sent as an HTTP status, and a later failure as an event.
            first = await anext(events)
        response = await stream.open()
        try:
            async with self._until(deadline):
                await self._send_all(request, job, first, events, stream)
                await stream.end()
        except APIError as error:
            logger.warning(
                "request %s%s failed while it was streamed, sending the error to the client: %s",
                job.id,
                client_name(http),
                error.message,
            )
            raise
        except ConnectionError:
            logger.info("request %s%s: the client disconnected", job.id, client_name(http))
            http[FINAL_STATUS] = CLIENT_CLOSED_REQUEST
        return response

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncGenerator[None, None]:
        """Run the `with` block until the deadline of the request.

        Raises:
            APIError: the deadline has passed.
        """
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise timed_out(self._timeout_s) from None

    async def _send_all(
        self,
        request: _Request,
        job: Job,
        first: tuple[Choice, TextOutput],
        events: _Events,
        stream: EventStream,
    ) -> None:
        offsets = {choice.index: 0 for choice in job.choices}

        async def send_output(choice: Choice, output: TextOutput) -> None:
            # Also send tokens without text: clients measure the time between tokens by the chunks.
            if output.text or output.token_ids or output.finish_reason is not None:
                offset = offsets[choice.index]
                size = _num_entries(output)
                if size <= INLINE_ENTRIES:
                    event = self._encode(self.chunk(request, job, choice, output, offset))
                else:
                    chunk = partial(self.chunk, request, job, choice, output, offset)
                    event = await run_off_loop(
                        lambda: msgspec.json.encode(chunk()), size, INLINE_ENTRIES
                    )
                await stream.send(event)
            if output.prompt_logprobs is not None:  # streamed only with echo
                prompt = choice.prompt_token_ids
                offsets[choice.index] += await run_off_loop(
                    lambda: sum(map(self._length, prompt)), len(prompt)
                )
            offsets[choice.index] += sum(self._length(item.token_id) for item in output.logprobs)

        for chunk in self.opening_chunks(request, job):
            await stream.send(self._encode(chunk))
        await send_output(*first)
        async for choice, output in events:
            await send_output(choice, output)
        if request.include_usage:
            await stream.send(self._encode(self.usage_chunk(job)))

    def _length(self, token_id: int) -> int:
        return len(self._tokenizer.token_text(token_id))

    @abc.abstractmethod
    def response(
        self, request: _Request, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> msgspec.Struct:
        """Return the JSON body of a response that is not streamed."""

    @abc.abstractmethod
    def opening_chunks(self, request: _Request, job: Job) -> list[msgspec.Struct]:
        """Return the chunks that a stream sends before the first token."""

    @abc.abstractmethod
    def chunk(
        self, request: _Request, job: Job, choice: Choice, output: TextOutput, offset: int
    ) -> msgspec.Struct:
        """Return the chunk that a stream sends for `output`.

        Args:
            request: the request.
            job: the request's job.
            choice: the choice to which the output belongs.
            output: new text and tokens of the choice.
            offset: number of characters of the choice's text before this output.
        """

    @abc.abstractmethod
    def usage_chunk(self, job: Job) -> msgspec.Struct: ...


def _data_parallel_rank(http: web.Request, in_body: int | None) -> int | None:
    """Return the data-parallel rank that the header or the body requests; None if neither does.

    Raises:
        RequestError: the header is not a number, or contradicts the body.
    """
    text = http.headers.get(DATA_PARALLEL_RANK)
    if text is None:
        return in_body
    if not _RANK.fullmatch(text):
        raise RequestError(
            f"{DATA_PARALLEL_RANK} must be a number, got {text[:40]!r}", param=DATA_PARALLEL_RANK
        )
    if in_body not in (None, int(text)):
        raise RequestError(
            f"{DATA_PARALLEL_RANK} is {text}, but data_parallel_rank is {in_body}; send only one",
            param="data_parallel_rank",
        )
    return int(text)


def _num_entries(output: TextOutput) -> int:
    """Return the number of log-probabilities in `output`, including those of the prompt."""
    return sum(
        1 + len(item.top)
        for items in (output.logprobs, output.prompt_logprobs or ())
        for item in items
    )


def returned_token_ids(
    request: GenerationRequest, output: TextOutput
) -> list[int] | msgspec.UnsetType:
    return output.token_ids if request.return_token_ids else msgspec.UNSET


def _merge(outputs: list[TextOutput]) -> TextOutput:
    return TextOutput(
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[item for output in outputs for item in output.logprobs],
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        prompt_logprobs=next(
            (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None
        ),
        num_nans_in_logits=sum(output.num_nans_in_logits for output in outputs),
        reply=_merge_replies([o.reply for o in outputs if o.reply is not None]),
    )


def _merge_replies(deltas: list[ReplyDelta]) -> ReplyDelta | None:
    return ReplyDelta.join(deltas) if deltas else None
