"""Anthropic's `/v1/messages`: the JSON of its responses and events."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from baton_gateway.endpoints.writers.generation_api import (
    GenerationAPI,
    GenerationWriter,
    new_call_id,
)
from baton_gateway.errors import MESSAGES_PATH
from baton_gateway.requests.job import Choice, Job
from baton_text.output import TextOutput
from baton_text.reply_parsing.reply_parser import ReplyDelta
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.messages_request import MessagesRequest
from baton_text.responses.anthropic import (
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    ResponseBlock,
    StopDelta,
)

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAPI(GenerationAPI[MessagesRequest]):
    path = MESSAGES_PATH
    body = MessagesRequest

    def request(self, body: MessagesRequest, earlier: bytes) -> ChatCompletionRequest:
        return body.chat_request()

    def writer(self, body: MessagesRequest, job: Job, client: str | None) -> MessagesWriter:
        return MessagesWriter(body, job, self._served_name, self._tokenizer)


class MessagesWriter(GenerationWriter[MessagesRequest]):
    """Writes messages that consist of blocks: reasoning, text and tool calls.

    A stream ends a block before it begins the next block.
    """

    LAST_EVENT = b""
    #: Index of the open block, or of the last block while no block is open.
    _index = -1
    #: Kind of the open block, or an empty string while no block is open.
    _open = ""
    _stop = StopDelta(stop_reason="end_turn", stop_sequence=None)

    def response(self, outputs: list[tuple[Choice, TextOutput]]) -> Message:
        [(_, output)] = outputs
        reply = self._reply(output)
        content: list[ResponseBlock] = []
        if reply.reasoning:
            content.append(_block("thinking", reply.reasoning))
        if reply.content:
            content.append(_block("text", reply.content))
        content += [_call(str(call.name), _arguments(call.arguments)) for call in reply.tool_calls]
        stop = _stop_delta(output)
        return self._message(content, stop.stop_reason, stop.stop_sequence)

    def opening(self) -> list[msgspec.Struct]:
        return [MessageStart(message=self._message([], None, None))]

    def events(self, choice: Choice, output: TextOutput, offset: int) -> list[msgspec.Struct]:
        reply = self._reply(output)
        events: list[msgspec.Struct] = []
        for kind, text in (("thinking", reply.reasoning), ("text", reply.content)):
            if text:
                if self._open != kind:
                    events += self._begin(kind, _block(kind, ""))
                events.append(self._delta(BlockDelta(type=f"{kind}_delta", **{kind: text})))
        for call in reply.tool_calls:
            if call.name is not msgspec.UNSET:
                events += self._begin("tool_use", _call(call.name, {}))
            if call.arguments:
                delta = BlockDelta(type="input_json_delta", partial_json=call.arguments)
                events.append(self._delta(delta))
        if output.finish_reason is not None:
            self._stop = _stop_delta(output)
        return events

    def closing(self) -> list[msgspec.Struct]:
        return [*self._end(), MessageDelta(delta=self._stop, usage=self._usage()), MessageStop()]

    def _reply(self, output: TextOutput) -> ReplyDelta:
        reply = ReplyDelta(content=output.text) if output.reply is None else output.reply
        if self.body.wants_reasoning:
            return reply
        return ReplyDelta(content=reply.content, tool_calls=reply.tool_calls)

    def _begin(self, kind: str, block: ResponseBlock) -> list[msgspec.Struct]:
        """Return the events that end the open block, if there is one, and begin `block`."""
        ended = self._end()
        self._index += 1
        self._open = kind
        return [*ended, ContentBlockStart(index=self._index, content_block=block)]

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._index, delta=delta)

    def _end(self) -> list[msgspec.Struct]:
        is_open, self._open = bool(self._open), ""
        return [ContentBlockStop(index=self._index)] if is_open else []

    def _message(
        self, content: list[ResponseBlock], stop_reason: str | None, stop_sequence: str | None
    ) -> Message:
        return Message(
            id=self.job.id,
            model=self.served_name,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self.job.usage()
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens", 0)
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


def _block(kind: str, text: str) -> ResponseBlock:
    if kind == "thinking":
        return ResponseBlock(type=kind, thinking=text, signature="")
    return ResponseBlock(type=kind, text=text)


def _call(name: str, arguments: dict[str, Any]) -> ResponseBlock:
    return ResponseBlock(type="tool_use", id=new_call_id(), name=name, input=arguments)


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call; empty if `text` is not a complete JSON object."""
    try:
        arguments = json.loads(text)
        msgspec.json.encode(arguments)  # UTF-8 cannot encode a lone surrogate
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _stop_delta(output: TextOutput) -> StopDelta:
    if isinstance(output.stop_reason, str):
        return StopDelta(stop_reason="stop_sequence", stop_sequence=output.stop_reason)
    reason = _STOP_REASONS.get(output.finish_reason or "", "end_turn")
    return StopDelta(stop_reason=reason, stop_sequence=None)
