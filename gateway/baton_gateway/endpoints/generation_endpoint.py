"""The endpoints that generate text: admission, complete responses, streams.

All of them are a `GenerationEndpoint`, each with its own `GenerationAPI`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Generic

import msgspec
from aiohttp import web

from baton_gateway.access.admission import Reservation
from baton_gateway.access.api_keys import CLIENT, client_name
from baton_gateway.endpoints.request_deadline import RequestDeadline
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.endpoints.stream_sender import StreamSender
from baton_gateway.endpoints.writers.generation_api import (
    INLINE_ENTRIES,
    LARGE_ENTRIES,
    Body,
    GenerationAPI,
    GenerationBody,
    GenerationWriter,
)
from baton_gateway.errors import APIError, bad_request, error_event
from baton_gateway.http.body_budget import BodyCharge
from baton_gateway.http.event_stream import EventStream
from baton_gateway.http.middlewares import CLIENT_CLOSED_REQUEST, FINAL_STATUS
from baton_gateway.http.request_body import INLINE_BODY_BYTES, VALUE_BYTES, bound_values
from baton_gateway.http.slow_clients import abort_if_unread
from baton_gateway.requests.generator import Generator
from baton_gateway.requests.job import Choice, Job
from baton_gateway.requests.job_builder import JobBuilder
from baton_gateway.requests.output_queue import CollectedOutput
from baton_gateway.thread_pool import run_encoding, run_off_loop
from baton_text.output import TextOutput
from baton_text.request_error import RequestError
from baton_text.requests.generation_request import MAX_RESPONSE_LOGPROBS

logger = logging.getLogger(__name__)

#: Header with the same meaning as the field data_parallel_rank of the body.
DATA_PARALLEL_RANK = "X-Data-Parallel-Rank"
_RANK = re.compile("[0-9]{1,9}")

_Events = AsyncGenerator[tuple[Choice, TextOutput], None]


class GenerationEndpoint(Generic[Body]):
    """An endpoint that generates text.

    Args:
        api: the API of the endpoint.
        services: the objects that all endpoints share.
        builder: converts requests to jobs, which are ready to run.
        generator: runs jobs on the engines.
    """

    def __init__(
        self,
        api: GenerationAPI[Body],
        services: RequestServices,
        builder: JobBuilder,
        generator: Generator,
    ) -> None:
        self._api = api
        self._services = services
        self._builder = builder
        self._generator = generator

    def route(self) -> web.RouteDef:
        return web.post(self._api.path, self.post)

    async def post(self, http: web.Request) -> web.StreamResponse:
        """Serve one request and return the response.

        Raises:
            APIError, RequestError: the request failed before the first byte of the response.
        """
        stream = EventStream(http, client_timeout_s=self._services.config.client_timeout_s)
        with self._services.admission.request(http.get(CLIENT)) as reservation:
            try:
                return await self._serve(http, reservation, stream)
            except (RequestError, APIError) as failure:
                if not stream.is_open:
                    raise
                return await _end_failed(http, stream, failure)

    async def _serve(
        self, http: web.Request, reservation: Reservation, stream: EventStream
    ) -> web.StreamResponse:
        """Read the body of one request, run its job and send the response.

        Args:
            http: the request.
            reservation: resized by this method to the sequences of the request.
            stream: opened by this method if the request asks for a stream.

        Raises:
            APIError, RequestError: the request failed, before or after `stream` was opened.
        """
        services, client, started = self._services, http.get(CLIENT), time.monotonic()
        deadline = RequestDeadline(services.config.request_timeout_s)
        async with services.bodies.charge(client) as charge:
            body, request, body_size = await self._read(http, charge)
            # Before the prompts are tokenized, so that a refusal takes little time.
            reservation.resize(request.num_sequences, request.num_options)
            async with deadline.paused():
                await services.queue.wait(stream.keep_alive if request.stream else None)
            async with deadline.enforced():
                job = await self._builder.build(request, started, body_size, client)
                start = partial(self._start, body, job, client)
                writer = await run_off_loop(start, body_size, INLINE_BODY_BYTES)
        on_output = partial(abort_if_unread, http, f"request {job.id}", len(job.choices))
        async with aclosing(self._generator.run(job, on_output)) as events:
            if request.stream:
                return await self._stream(http, writer, events, deadline, stream)
            encoded = await self._encoded_answer(writer, events, deadline)
            return await services.send(http, encoded, deadline.left_s)

    async def _read(
        self, http: web.Request, charge: BodyCharge
    ) -> tuple[Body, GenerationBody, int]:
        """Return the parsed body, the request converted for a job, and the size in bytes.

        The size includes the body and the stored messages that the request continues.

        Raises:
            APIError, RequestError: the headers or the body are invalid, the body does not arrive in
                time, or the request names another model or a response that is not stored.
        """
        body, size = await self._services.read(http, charge, self._api.body)
        find_earlier = partial(self._api.earlier, body, http.get(CLIENT))
        earlier = await run_off_loop(find_earlier, size, INLINE_BODY_BYTES)
        charge.add(len(earlier))
        count = partial(bound_values, earlier)
        charge.add(VALUE_BYTES * await run_off_loop(count, len(earlier), INLINE_BODY_BYTES))
        size += len(earlier)
        convert = partial(self._api.request, body, earlier)
        request = await run_off_loop(convert, size, INLINE_BODY_BYTES)
        request.data_parallel_rank = _data_parallel_rank(http, request.data_parallel_rank)
        return body, request, size

    def _start(self, body: Body, job: Job, client: str | None) -> GenerationWriter[Body]:
        """Prepare to run `job`: return the writer, and call `release_prompt` on the requests."""
        writer = self._api.writer(body, job, client)
        body.release_prompt()
        job.request.release_prompt()
        return writer

    async def _encoded_answer(
        self, writer: GenerationWriter[Any], events: _Events, deadline: RequestDeadline
    ) -> bytes:
        """Wait for all outputs, and return the complete response as JSON.

        Raises:
            APIError, RequestError: the job failed, or the response has too many log-probabilities.
        """
        job = writer.job
        outputs = {id(choice): CollectedOutput() for choice in job.choices}
        num_logprobs = 0

        def body() -> bytes:
            whole = [(choice, outputs[id(choice)].output()) for choice in job.best_choices()]
            return msgspec.json.encode(writer.response(whole))

        async with deadline.enforced():
            async for choice, output in events:
                outputs[id(choice)].add(output)
                num_logprobs += output.num_new_logprobs
                if num_logprobs > MAX_RESPONSE_LOGPROBS:
                    raise RequestError(
                        f"the response has more than {MAX_RESPONSE_LOGPROBS} log-probabilities; "
                        "send stream=true, or a smaller max_tokens, n or number of logprobs",
                        param="logprobs",
                    )

            return await run_encoding(body, job.num_entries, INLINE_ENTRIES, LARGE_ENTRIES)

    async def _stream(
        self,
        http: web.Request,
        writer: GenerationWriter[Any],
        events: _Events,
        deadline: RequestDeadline,
        stream: EventStream,
    ) -> web.StreamResponse:
        async with deadline.enforced():
            # A failure before the first output is sent as an HTTP status, a later one as an event.
            first = await anext(events)
        response = await stream.open()
        try:
            async with deadline.enforced():
                sender = StreamSender(writer, stream)
                await sender.begin()
                await sender.send_output(*first)
                async for choice, output in events:
                    await sender.send_output(choice, output)
                await sender.end()
        except APIError as error:
            logger.warning(
                "request %s%s failed while it was streamed, sending the error to the client: %s",
                writer.job.id,
                client_name(http),
                error.message,
            )
            raise
        except ConnectionError:
            logger.info("request %s%s: the client disconnected", writer.job.id, client_name(http))
            http[FINAL_STATUS] = CLIENT_CLOSED_REQUEST
        return response


async def _end_failed(
    http: web.Request, stream: EventStream, failure: RequestError | APIError
) -> web.StreamResponse:
    """Send `failure` as the last event of an open stream, and return the stream's response."""
    error = bad_request(failure) if isinstance(failure, RequestError) else failure
    http[FINAL_STATUS] = error.status
    with suppress(ConnectionError):
        await stream.fail(*error_event(http.path, error))
    return await stream.open()


def _data_parallel_rank(http: web.Request, in_body: int | None) -> int | None:
    """Return the data-parallel rank in the header or the body; None if neither has a rank.

    Raises:
        RequestError: the header's value is not a number, or differs from the body's.
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
