"""Structs for the JSON of OpenAI's /v1/responses: responses, and the events of streams."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from baton_text.requests.responses_request import ReasoningOptions, ResponseTool, TextOptions


class OutputPart(msgspec.Struct, kw_only=True):
    #: output_text or reasoning_text.
    type: str
    #: The text.
    text: str
    #: Always empty. Only in parts of type output_text.
    annotations: list[Any] | UnsetType = UNSET
    #: Always empty. Only in parts of type output_text.
    logprobs: list[Any] | UnsetType = UNSET


class OutputItem(msgspec.Struct, kw_only=True):
    #: message, function_call or reasoning.
    type: str
    #: Id of the item.
    id: str
    #: in_progress at the start of a streamed item, completed, or incomplete at a limit on tokens.
    status: str
    #: Author of a message: assistant.
    role: str | UnsetType = UNSET
    #: Parts of a message or of the reasoning.
    content: list[OutputPart] | UnsetType = UNSET
    #: Always empty. Only in items of type reasoning.
    summary: list[Any] | UnsetType = UNSET
    #: Id of the call of a function_call, which its result repeats.
    call_id: str | UnsetType = UNSET
    #: Name of the function of a function_call.
    name: str | UnsetType = UNSET
    #: JSON text of the arguments of a function_call.
    arguments: str | UnsetType = UNSET


class ResponseUsage(msgspec.Struct, kw_only=True):
    #: Tokens of the prompt.
    input_tokens: int
    #: `cached_tokens`: prompt tokens taken from a prefix cache.
    input_tokens_details: dict[str, int]
    #: Generated tokens.
    output_tokens: int
    #: `reasoning_tokens`: generated tokens of the reasoning.
    output_tokens_details: dict[str, int]
    #: Sum of `input_tokens` and `output_tokens`.
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    #: Id of the response, for `previous_response_id`.
    id: str
    #: Unix time of the request, in seconds.
    created_at: int
    #: Name of the served model.
    model: str
    #: in_progress, completed, or incomplete at a limit on tokens.
    status: str
    #: Reasoning, text and calls, in this order.
    output: list[OutputItem]
    #: Numbers of tokens. Null while the response is in progress.
    usage: ResponseUsage | None = None
    #: `reason`: max_output_tokens. Null unless the status is incomplete.
    incomplete_details: dict[str, str] | None = None
    #: As in the request.
    instructions: str | None = None
    #: As in the request.
    max_output_tokens: int | None = None
    #: As in the request.
    metadata: dict[str, str] = {}
    #: As in the request.
    parallel_tool_calls: bool = True
    #: As in the request.
    previous_response_id: str | None = None
    #: As in the request.
    reasoning: ReasoningOptions | None = None
    #: As in the request.
    store: bool = True
    #: As in the request.
    temperature: float | None = None
    #: As in the request.
    text: TextOptions | None = None
    #: As in the request.
    tool_choice: Any = "auto"
    #: As in the request.
    tools: list[ResponseTool] = []
    #: As in the request.
    top_p: float | None = None
    #: Always disabled.
    truncation: str = "disabled"
    #: Always null.
    error: None = None
    #: Kind of the object.
    object: str = "response"


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a streamed response. The event's type determines which fields are set."""

    #: Such as response.output_text.delta.
    type: str
    #: Number of the event, from 0 on.
    sequence_number: int
    #: The response, in events about the response as a whole.
    response: Response | UnsetType = UNSET
    #: Number of the item, from 0 on.
    output_index: int | UnsetType = UNSET
    #: The item, in response.output_item events.
    item: OutputItem | UnsetType = UNSET
    #: Id of the item, in events of its content.
    item_id: str | UnsetType = UNSET
    #: Always 0.
    content_index: int | UnsetType = UNSET
    #: The part, in response.content_part events.
    part: OutputPart | UnsetType = UNSET
    #: Text to append.
    delta: str | UnsetType = UNSET
    #: The whole text of a part.
    text: str | UnsetType = UNSET
    #: Always empty. Only in events of output_text.
    logprobs: list[Any] | UnsetType = UNSET
    #: The whole arguments of a function_call.
    arguments: str | UnsetType = UNSET
    #: Name of the function of a function_call.
    name: str | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, kw_only=True):
    #: Id of the response.
    id: str
    #: Always true.
    deleted: bool = True
    #: Kind of the object.
    object: str = "response.deleted"


class ResponseError(msgspec.Struct, kw_only=True):
    """The last event of a stream that failed."""

    #: The problem and its remedy.
    message: str
    #: Machine-readable reason. Null if there is none.
    code: str | None
    #: The invalid field. Null if no single field is invalid.
    param: str | None
    #: Number of the event. Always 0, because earlier events are not counted.
    sequence_number: int = 0
    #: Kind of the event.
    type: str = "error"
