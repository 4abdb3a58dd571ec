"""Structs for the JSON of Anthropic's /v1/messages: responses, the events of streams, errors."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class MessageUsage(msgspec.Struct, kw_only=True):
    #: Tokens of the prompt, except those of `cache_read_input_tokens`. Only the last event of a
    #: stream may leave it out.
    input_tokens: int
    #: Generated tokens.
    output_tokens: int
    #: Prompt tokens taken from a prefix cache.
    cache_read_input_tokens: int
    #: Always 0.
    cache_creation_input_tokens: int = 0


class ResponseBlock(msgspec.Struct, kw_only=True):
    #: text, thinking or tool_use.
    type: str
    #: The text of a block of type text.
    text: str | UnsetType = UNSET
    #: The reasoning of a block of type thinking.
    thinking: str | UnsetType = UNSET
    #: Always empty. Only in blocks of type thinking.
    signature: str | UnsetType = UNSET
    #: Id of the call of a block of type tool_use, which the result of the call repeats.
    id: str | UnsetType = UNSET
    #: Name of the tool of a block of type tool_use.
    name: str | UnsetType = UNSET
    #: The arguments of a block of type tool_use. Empty at the start of a streamed block.
    input: dict[str, Any] | UnsetType = UNSET


class Message(msgspec.Struct, kw_only=True):
    #: Id of the request.
    id: str
    #: Name of the served model.
    model: str
    #: Reasoning, text and calls, in this order.
    content: list[ResponseBlock]
    #: end_turn, max_tokens, stop_sequence or tool_use. Null at the start of a stream.
    stop_reason: str | None
    #: The stop string that ended the text. Null: another reason.
    stop_sequence: str | None
    #: Numbers of tokens.
    usage: MessageUsage
    #: Author of the message.
    role: str = "assistant"
    #: Kind of the object.
    type: str = "message"


class MessageStart(msgspec.Struct, kw_only=True):
    """The first event of a stream."""

    #: The message, still without content.
    message: Message
    #: Kind of the event.
    type: str = "message_start"


class ContentBlockStart(msgspec.Struct, kw_only=True):
    #: Number of the block, from 0 on.
    index: int
    #: The block, still without text.
    content_block: ResponseBlock
    #: Kind of the event.
    type: str = "content_block_start"


class BlockDelta(msgspec.Struct, kw_only=True):
    #: text_delta, thinking_delta or input_json_delta.
    type: str
    #: Text to append to a block of type text.
    text: str | UnsetType = UNSET
    #: Text to append to a block of type thinking.
    thinking: str | UnsetType = UNSET
    #: JSON text to append to the arguments of a block of type tool_use.
    partial_json: str | UnsetType = UNSET


class ContentBlockDelta(msgspec.Struct, kw_only=True):
    #: Number of the block.
    index: int
    #: What the event adds to the block.
    delta: BlockDelta
    #: Kind of the event.
    type: str = "content_block_delta"


class ContentBlockStop(msgspec.Struct, kw_only=True):
    #: Number of the block.
    index: int
    #: Kind of the event.
    type: str = "content_block_stop"


class StopDelta(msgspec.Struct, kw_only=True):
    #: end_turn, max_tokens, stop_sequence or tool_use.
    stop_reason: str
    #: The stop string that ended the text. Null: another reason.
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    """The event after the last content block of a stream."""

    #: Why the message ended.
    delta: StopDelta
    #: Numbers of tokens of the whole message.
    usage: MessageUsage
    #: Kind of the event.
    type: str = "message_delta"


class MessageStop(msgspec.Struct, kw_only=True):
    """The last event of a stream."""

    #: Kind of the event.
    type: str = "message_stop"


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of /v1/messages/count_tokens."""

    #: Tokens of the prompt.
    input_tokens: int


class MessageErrorDetail(msgspec.Struct, kw_only=True):
    #: Kind of error, which the HTTP status determines.
    type: str
    #: The problem and its remedy.
    message: str


class MessageError(msgspec.Struct, kw_only=True):
    #: The error.
    error: MessageErrorDetail
    #: Kind of the object.
    type: str = "error"


#: The events of a stream.
EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)
