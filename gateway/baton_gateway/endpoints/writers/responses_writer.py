"""OpenAI's `/v1/responses`: the JSON of its responses and events."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from baton_gateway.endpoints.writers.generation_api import (
    GenerationAPI,
    GenerationWriter,
    new_call_id,
)
from baton_gateway.errors import RESPONSES_PATH
from baton_gateway.requests.job import Choice, Job
from baton_gateway.requests.response_store import (
    MAX_CONVERSATION_BYTES,
    ResponseStore,
    new_item_id,
)
from baton_text.chat_messages import CalledFunction, ChatMessage, ToolCall
from baton_text.output import TextOutput
from baton_text.reply_parsing.reply_parser import ReplyDelta
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.responses_request import MAX_RETURNED_BYTES, ResponsesRequest
from baton_text.responses.responses_api import (
    OutputItem,
    OutputPart,
    Response,
    ResponseEvent,
    ResponseUsage,
)
from baton_text.tokenizer import Tokenizer

#: By the type of an item with a text: the type of its content part, which its events also contain.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
#: Prefix of the ids of items, by the type of the item.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesAPI(GenerationAPI[ResponsesRequest]):
    """The API `/v1/responses`, which stores its responses for later requests.

    Args:
        store: the responses of this gateway.
    """

    path = RESPONSES_PATH
    body = ResponsesRequest

    def __init__(self, served_name: str, tokenizer: Tokenizer, store: ResponseStore) -> None:
        super().__init__(served_name, tokenizer)
        self._store = store

    def earlier(self, body: ResponsesRequest, client: str | None) -> bytes:
        return self._store.earlier(body.previous_response_id, body.referenced_ids(), client)

    def request(self, body: ResponsesRequest, earlier: bytes) -> ChatCompletionRequest:
        return body.chat_request(earlier)

    def writer(self, body: ResponsesRequest, job: Job, client: str | None) -> ResponsesWriter:
        return ResponsesWriter(
            body, job, self._served_name, self._tokenizer, store=self._store, client=client
        )


class ResponsesWriter(GenerationWriter[ResponsesRequest]):
    """Writes responses that consist of items: reasoning, messages and tool calls.

    A stream ends an item before it begins the next item.

    Args:
        store: keeps the response, unless the request forbids it.
        client: name of the client; None if clients need no API key.
    """

    LAST_EVENT = b""

    def __init__(
        self,
        body: ResponsesRequest,
        job: Job,
        served_name: str,
        tokenizer: Tokenizer,
        *,
        store: ResponseStore,
        client: str | None,
    ) -> None:
        super().__init__(body, job, served_name, tokenizer)
        self._store = store
        self._client = client
        self._id = job.id.replace("chatcmpl-", "resp_")
        self._output: list[OutputItem] = []
        self._num_events = 0
        #: The item that receives text, or None. `_texts` has its text so far.
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._is_truncated = False
        is_short = len((body.instructions or "").encode()) <= MAX_RETURNED_BYTES
        # As JSON, because objects take many times the memory, and the request may run for hours.
        self._returned: dict[str, Any] = {
            name: msgspec.Raw(msgspec.json.encode(value))
            for name, value in (
                ("instructions", body.instructions if is_short else None),
                ("metadata", body.metadata or {}),
                ("text", body.text),
                ("tool_choice", "auto" if body.tool_choice is None else body.tool_choice),
                ("tools", body.tools or []),
            )
        }
        self._conversation: bytes | None = None
        if body.store is not False:
            assert isinstance(job.request, ChatCompletionRequest)
            messages = job.request.messages[1 if body.instructions else 0 :]
            conversation = msgspec.json.encode(messages)
            if len(conversation) <= MAX_CONVERSATION_BYTES:
                self._conversation = conversation

    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> Response:
        [(choice, output)] = outputs
        self.events(choice, output, 0)
        self._end()
        return self._finish()

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._event(f"response.{kind}", response=self._response("in_progress"))
            for kind in ("created", "in_progress")
        ]

    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        reply = ReplyDelta(content=output.text) if output.reply is None else output.reply
        events: list[msgspec.Struct] = []
        for kind, text in (("reasoning", reply.reasoning), ("message", reply.content)):
            if text:
                if self._open is None or self._open.type != kind:
                    events += self._begin(kind)
                events.append(self._add(f"response.{_TEXTS[kind]}.delta", text))
        for call in reply.tool_calls:
            if call.name is not msgspec.UNSET:
                events += self._begin("function_call", call.name)
            if call.arguments:
                events.append(self._add("response.function_call_arguments.delta", call.arguments))
        self._is_truncated |= output.finish_reason == "length"
        return events

    def closing(self) -> list[msgspec.Struct]:
        ended = self._end()
        response = self._finish()
        return [*ended, self._event(f"response.{response.status}", response=response)]

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event

    def _item_event(self, kind: str, item: OutputItem, **fields: Any) -> ResponseEvent:
        """Return an event about the content of `item`, which is the open item."""
        if item.type in _TEXTS:
            fields["content_index"] = 0
        return self._event(kind, item_id=item.id, output_index=len(self._output), **fields)

    def _begin(self, kind: str, name: str = "") -> list[msgspec.Struct]:
        """Return the events that end the open item and begin a new one.

        Args:
            kind: type of the new item.
            name: name of the called tool, if the item is a tool call.
        """
        events = self._end()
        index = len(self._output)
        item = _item(kind, new_item_id(_PREFIXES[kind], self._id, index), name)
        self._open, self._texts = item, []
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if item.type in _TEXTS:
            part = _part(item.type, "")
            events.append(self._item_event("response.content_part.added", item, part=part))
        return events

    def _add(self, kind: str, text: str) -> ResponseEvent:
        assert self._open is not None
        self._texts.append(text)
        event = self._item_event(kind, self._open, delta=text)
        if self._open.type == "message":
            event.logprobs = []
        return event

    def _end(self) -> list[msgspec.Struct]:
        """Return the events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(self._texts)
        status = "incomplete" if self._is_truncated else "completed"
        events: list[msgspec.Struct] = []
        if item.type in _TEXTS:
            part = _part(item.type, text)
            done = msgspec.structs.replace(item, status=status, content=[part])
            ended = self._item_event(f"response.{_TEXTS[item.type]}.done", item, text=text)
            if item.type == "message":
                ended.logprobs = []
            events += [ended, self._item_event("response.content_part.done", item, part=part)]
        else:
            done = msgspec.structs.replace(item, status=status, arguments=text)
            events.append(
                self._item_event(
                    "response.function_call_arguments.done", item, arguments=text, name=item.name
                )
            )
        index = len(self._output)
        events.append(self._event("response.output_item.done", output_index=index, item=done))
        self._output.append(done)
        return events

    def _finish(self) -> Response:
        """Return the complete response. Also store the response if `_conversation` is set."""
        response = self._response("incomplete" if self._is_truncated else "completed")
        usage = self.job.usage()
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details or {},
            output_tokens=usage.completion_tokens,
            output_tokens_details=usage.completion_tokens_details or {"reasoning_tokens": 0},
            total_tokens=usage.total_tokens,
        )
        if self._is_truncated:
            response.incomplete_details = {"reason": "max_output_tokens"}
        if self._conversation is not None:
            earlier = msgspec.json.decode(self._conversation, type=list[msgspec.Raw])
            self._store.put(response, [*earlier, _answer(self._output)], self._client)
        return response

    def _response(self, status: str) -> Response:
        body = self.body
        return Response(
            id=self._id,
            created_at=self.job.created,
            model=self.served_name,
            status=status,
            output=list(self._output),
            max_output_tokens=body.max_output_tokens,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning,
            store=body.store is not False,
            temperature=body.temperature,
            top_p=body.top_p,
            **self._returned,
        )


def _item(kind: str, identifier: str, name: str) -> OutputItem:
    """Return a new, empty output item with status `in_progress`."""
    if kind == "function_call":
        return OutputItem(
            type=kind,
            id=identifier,
            status="in_progress",
            call_id=new_call_id(),
            name=name,
            arguments="",
        )
    if kind == "reasoning":
        return OutputItem(type=kind, id=identifier, status="in_progress", content=[], summary=[])
    return OutputItem(type=kind, id=identifier, status="in_progress", role="assistant", content=[])


def _part(kind: str, text: str) -> OutputPart:
    if kind == "message":
        return OutputPart(type="output_text", text=text, annotations=[], logprobs=[])
    return OutputPart(type="reasoning_text", text=text)


def _answer(output: list[OutputItem]) -> ChatMessage:
    """Convert the items to one assistant message. Leave out tool calls that were cut off."""
    message = ChatMessage(role="assistant")
    texts: list[str] = []
    for item in output:
        if isinstance(item.content, list):
            text = "".join(part.text for part in item.content)
            if item.type == "reasoning":
                message.reasoning_content = text
            else:
                texts.append(text)
        elif _is_object(str(item.arguments)):
            function = CalledFunction(name=str(item.name), arguments=str(item.arguments))
            message.tool_calls = message.tool_calls or []
            message.tool_calls.append(ToolCall(id=str(item.call_id), function=function))
    message.content = "".join(texts)
    return message


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
