"""The two generation endpoints: OpenAI requests to jobs, their outputs to JSON or server-sent events."""

from __future__ import annotations

import abc
import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from baton_gateway.access import CLIENT, client_name
from baton_gateway.admission import Admission
from baton_gateway.bodies import parse_body, read_body
from baton_gateway.delivery import deliver, hang_up, hang_up_if_unread, is_unread
from baton_gateway.errors import APIError, bad_request, timed_out, unknown_model
from baton_gateway.event_stream import LAST_WORDS_S, EventStream
from baton_gateway.generation import GenerationService
from baton_gateway.holding import HoldingRoom
from baton_gateway.jobs import Choice, Job
from baton_gateway.workers import offload
from baton_text.errors import RequestError
from baton_text.output import TextOutput, chat_logprobs, completion_logprobs, prompt_token_logprobs
from baton_text.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokenLogprob,
)
from baton_text.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that went away; it is only counted, never sent."""

DATA_PARALLEL_RANK = "X-Data-Parallel-Rank"
"""Header that does what data_parallel_rank in the body does."""
_RANK = re.compile("[0-9]{1,9}")

FINAL_STATUS = web.RequestKey("final_status", int)
"""Status for the metrics when a stream that began as 200 failed later."""

INLINE_ENTRIES = 1024
"""Tokens, and log-probabilities of each. An answer, or a chunk, with more is written in a thread."""

_Request = TypeVar("_Request", bound=GenerationRequest)
_Events = AsyncGenerator[tuple[Choice, TextOutput], None]


class Endpoint(abc.ABC, Generic[_Request]):
    """One of the generation endpoints."""

    kind: type[_Request]

    def __init__(
        self,
        service: GenerationService,
        admission: Admission,
        room: HoldingRoom,
        *,
        served_name: str,
        request_timeout_s: float,
    ) -> None:
        self._service = service
        self._admission = admission
        self._room = room
        self._served_name = served_name
        self._timeout_s = request_timeout_s
        self._encode = msgspec.json.Encoder().encode

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Raises APIError for everything that goes wrong before the first byte of the answer."""
        started = time.monotonic()
        self._admission.check_draining()
        self._admission.begin()
        try:
            return await self._serve(http, started)
        except RequestError as error:
            raise bad_request(error) from error
        finally:
            self._admission.end()

    async def _serve(self, http: web.Request, started: float) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        if http.content_type != "application/json":
            message = f"Content-Type must be application/json, got {http.content_type!r}."
            raise APIError(415, message, code="unsupported_media_type")
        body = await read_body(http, deadline, self._timeout_s)
        request = await parse_body(body, self.kind, self._service.max_model_len)
        request.data_parallel_rank = _data_parallel_rank(http, request.data_parallel_rank)
        if request.model != self._served_name:
            raise unknown_model(request.model, self._served_name)
        client = http.get(CLIENT)
        self._admission.take(request.num_sequences, client)  # before the prompts cost anything
        stream = EventStream(http, is_wanted=bool(request.stream))
        try:
            await self._room.wait(stream.keep_alive)
            job = await self.prepare(request, started, len(body))
            on_backlog = partial(hang_up_if_unread, http, f"request {job.id}")
            async with aclosing(self._service.run(job, on_backlog)) as events:
                if request.stream:
                    return await self._stream(http, request, job, events, deadline, stream)
                return await self._answer(http, request, job, events, deadline)
        except (RequestError, APIError) as failure:
            if not stream.is_open:
                raise
            error = bad_request(failure) if isinstance(failure, RequestError) else failure
            http[FINAL_STATUS] = error.status
            return await stream.fail(self._encode(error.body))
        finally:
            self._admission.give(request.num_sequences, client)

    async def _answer(
        self, http: web.Request, request: _Request, job: Job, events: _Events, deadline: float
    ) -> web.Response:
        outputs: dict[int, list[TextOutput]] = {choice.index: [] for choice in job.choices}
        try:
            async with asyncio.timeout_at(deadline):
                async for choice, output in events:
                    outputs[choice.index].append(output)
        except TimeoutError:
            raise timed_out(self._timeout_s) from None

        def body() -> bytes:
            merged_by_index = {index: _merge(parts) for index, parts in outputs.items() if parts}
            indices = {id(choice): choice.index for choice in job.choices}
            merged = [
                (choice, merged_by_index[indices[id(choice)]]) for choice in job.best_choices()
            ]
            return msgspec.json.encode(self.response(request, job, merged))

        return await deliver(http, await offload(body, job.num_entries, INLINE_ENTRIES), deadline)

    async def _stream(
        self,
        http: web.Request,
        request: _Request,
        job: Job,
        events: _Events,
        deadline: float,
        stream: EventStream,
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout_at(deadline):
                first = await anext(
                    events
                )  # a failure up to here is an HTTP status, later an event of the stream
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        response = await stream.open()

        async def send(event: bytes) -> None:
            await response.write(b"data: " + event + b"\n\n")

        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._send_all(request, job, first, events, send)
                    await response.write(b"data: [DONE]\n\n")
                    await response.write_eof()
            except (APIError, TimeoutError) as failure:
                error = failure if isinstance(failure, APIError) else timed_out(self._timeout_s)
                logger.warning(
                    "request %s%s failed while it was streamed: %s",
                    job.id,
                    client_name(http),
                    error.message,
                )
                http[FINAL_STATUS] = error.status
                if isinstance(failure, TimeoutError) and is_unread(http):
                    raise
                async with asyncio.timeout(LAST_WORDS_S):
                    await send(self._encode(error.body))
                    await response.write_eof()
        except TimeoutError:  # a client that reads nothing must not hold its place for ever
            hang_up(http, f"request {job.id}")
        except ConnectionError:
            logger.info("request %s%s: the client went away", job.id, client_name(http))
            http[FINAL_STATUS] = CLIENT_CLOSED_REQUEST
        return response

    async def _send_all(
        self,
        request: _Request,
        job: Job,
        first: tuple[Choice, TextOutput],
        events: _Events,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        offsets = {choice.index: 0 for choice in job.choices}

        async def send_output(choice: Choice, output: TextOutput) -> None:
            # A held back text is no news; the end of a choice is, and so is a token's logprob.
            wants_ids = bool(request.return_token_ids and output.token_ids)
            if (
                output.text
                or _has_logprobs(output)
                or wants_ids
                or output.finish_reason is not None
            ):
                offset = offsets[choice.index]
                size = _num_entries(output)
                if size <= INLINE_ENTRIES:
                    event = self._encode(self.chunk(request, job, choice, output, offset))
                else:
                    chunk = partial(self.chunk, request, job, choice, output, offset)
                    event = await offload(
                        lambda: msgspec.json.encode(chunk()), size, INLINE_ENTRIES
                    )
                await send(event)
            if output.prompt_logprobs is not None:  # only with echo may they be streamed
                prompt = choice.prompt_token_ids
                offsets[choice.index] += await offload(
                    lambda: sum(map(self._length, prompt)), len(prompt)
                )
            offsets[choice.index] += sum(self._length(item.token_id) for item in output.logprobs)

        for chunk in self.opening(request, job):
            await send(self._encode(chunk))
        await send_output(*first)
        async for choice, output in events:
            await send_output(choice, output)
        if request.include_usage:
            await send(self._encode(self.usage_chunk(job)))

    def _length(self, token_id: int) -> int:
        return len(self._service.tokenizer.token_text(token_id))

    @abc.abstractmethod
    async def prepare(self, request: _Request, started: float, size: int) -> Job:
        """`size`: bytes of the body."""

    @abc.abstractmethod
    def response(
        self, request: _Request, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> msgspec.Struct:
        """The whole answer."""

    @abc.abstractmethod
    def opening(self, request: _Request, job: Job) -> list[msgspec.Struct]:
        """Chunks before the first token."""

    @abc.abstractmethod
    def chunk(
        self, request: _Request, job: Job, choice: Choice, output: TextOutput, offset: int
    ) -> msgspec.Struct: ...

    @abc.abstractmethod
    def usage_chunk(self, job: Job) -> msgspec.Struct: ...


class ChatEndpoint(Endpoint[ChatCompletionRequest]):
    kind = ChatCompletionRequest

    async def prepare(self, request: ChatCompletionRequest, started: float, size: int) -> Job:
        return await self._service.prepare_chat(request, started, size)

    def response(
        self, request: ChatCompletionRequest, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=ChatResponseMessage(content=output.text),
                logprobs=self._logprobs(request, output),
                finish_reason=output.finish_reason or "stop",
                stop_reason=output.stop_reason,
                token_ids=_token_ids(request, output),
            )
            for choice, output in outputs
        ]
        answer = ChatCompletion(
            id=job.id, created=job.created, model=job.model, choices=choices, usage=job.usage()
        )
        if request.prompt_logprobs is not None:
            answer.prompt_logprobs = _prompt_logprobs(self._service.tokenizer, outputs[0][1])
        return answer

    def opening(self, request: ChatCompletionRequest, job: Job) -> list[msgspec.Struct]:
        delta = ChatDelta(role="assistant", content="")
        return [
            self._chunk(request, job, ChatChunkChoice(index=choice.index, delta=delta))
            for choice in job.choices
        ]

    def chunk(
        self,
        request: ChatCompletionRequest,
        job: Job,
        choice: Choice,
        output: TextOutput,
        offset: int,
    ) -> ChatCompletionChunk:
        piece = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=output.text) if output.text else ChatDelta(),
            logprobs=self._logprobs(request, output) if output.logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=_token_ids(request, output),
        )
        return self._chunk(request, job, piece)

    def usage_chunk(self, job: Job) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=job.id, created=job.created, model=job.model, choices=[], usage=job.usage()
        )

    def _chunk(
        self, request: ChatCompletionRequest, job: Job, choice: ChatChunkChoice
    ) -> ChatCompletionChunk:
        usage = None if request.include_usage else msgspec.UNSET
        return ChatCompletionChunk(
            id=job.id, created=job.created, model=job.model, choices=[choice], usage=usage
        )

    def _logprobs(self, request: ChatCompletionRequest, output: TextOutput) -> ChatLogprobs | None:
        return chat_logprobs(self._service.tokenizer, output.logprobs) if request.logprobs else None


class CompletionEndpoint(Endpoint[CompletionRequest]):
    kind = CompletionRequest

    async def prepare(self, request: CompletionRequest, started: float, size: int) -> Job:
        return await self._service.prepare_completion(request, started, size)

    def response(
        self, request: CompletionRequest, job: Job, outputs: list[tuple[Choice, TextOutput]]
    ) -> Completion:
        choices = []
        for choice, output in outputs:
            piece = CompletionChoice(
                index=choice.index,
                text=choice.echo + output.text,
                logprobs=self._logprobs(request, choice, output, 0),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=_token_ids(request, output),
            )
            if request.prompt_logprobs is not None:
                piece.prompt_logprobs = _prompt_logprobs(self._service.tokenizer, output)
            choices.append(piece)
        return Completion(
            id=job.id, created=job.created, model=job.model, choices=choices, usage=job.usage()
        )

    def opening(self, request: CompletionRequest, job: Job) -> list[msgspec.Struct]:
        if request.logprobs is not None:
            return []  # the prompt's text goes with its logprobs, in each choice's first chunk
        return [
            self._chunk(request, job, CompletionChoice(index=choice.index, text=choice.echo))
            for choice in job.choices
            if choice.echo
        ]

    def chunk(
        self, request: CompletionRequest, job: Job, choice: Choice, output: TextOutput, offset: int
    ) -> Completion:
        piece = CompletionChoice(
            index=choice.index,
            text=(choice.echo if output.prompt_logprobs is not None else "") + output.text,
            logprobs=self._logprobs(request, choice, output, offset)
            if _has_logprobs(output)
            else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=_token_ids(request, output),
        )
        return self._chunk(request, job, piece)

    def usage_chunk(self, job: Job) -> Completion:
        return Completion(
            id=job.id, created=job.created, model=job.model, choices=[], usage=job.usage()
        )

    def _chunk(self, request: CompletionRequest, job: Job, choice: CompletionChoice) -> Completion:
        usage = None if request.include_usage else msgspec.UNSET
        return Completion(
            id=job.id, created=job.created, model=job.model, choices=[choice], usage=usage
        )

    def _logprobs(
        self, request: CompletionRequest, choice: Choice, output: TextOutput, offset: int
    ) -> CompletionLogprobs | None:
        """`offset`: characters of the tokens before; those of an echoed prompt come with the first of the answer."""
        if request.logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        if request.echo and output.prompt_logprobs is not None:
            first_token_id = choice.prompt_token_ids[0]
            items = [*output.prompt_logprobs, *output.logprobs]
            return completion_logprobs(tokenizer, items, offset, first_token_id=first_token_id)
        return completion_logprobs(tokenizer, output.logprobs, offset)


def _data_parallel_rank(http: web.Request, in_body: int | None) -> int | None:
    """The rank that the request asks for, in its header or in its body. Raises RequestError."""
    text = http.headers.get(DATA_PARALLEL_RANK)
    if text is None:
        return in_body
    if not _RANK.fullmatch(text):
        raise RequestError(
            f"{DATA_PARALLEL_RANK} must be a number, got {text[:40]!r}", param=DATA_PARALLEL_RANK
        )
    if in_body not in (None, int(text)):
        raise RequestError(
            f"{DATA_PARALLEL_RANK} is {text}, but data_parallel_rank is {in_body}; send one of them",
            param="data_parallel_rank",
        )
    return int(text)


def _num_entries(output: TextOutput) -> int:
    """Tokens and log-probabilities."""
    return sum(
        1 + len(item.top)
        for items in (output.logprobs, output.prompt_logprobs or ())
        for item in items
    )


def _token_ids(request: GenerationRequest, output: TextOutput) -> list[int] | msgspec.UnsetType:
    return output.token_ids if request.return_token_ids else msgspec.UNSET


def _has_logprobs(output: TextOutput) -> bool:
    return bool(output.logprobs) or output.prompt_logprobs is not None


def _prompt_logprobs(
    tokenizer: Tokenizer, output: TextOutput
) -> list[dict[int, PromptTokenLogprob] | None]:
    return prompt_token_logprobs(tokenizer, output.prompt_logprobs or [])


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
    )
