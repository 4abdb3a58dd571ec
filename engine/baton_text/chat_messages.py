"""Checks chat messages and converts them to the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from baton_text.json_values import count_values
from baton_text.request_error import RequestError, quote

#: Limit on the JSON values in the arguments of all tool calls of a conversation. The arguments are
#: strings in the request's body, so limits on the JSON values of the body do not count them.
MAX_ARGUMENT_VALUES = 2**17
#: Limit on the arrays and objects in the arguments of all tool calls of a conversation.
MAX_ARGUMENT_CONTAINERS = 2**16

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ContentPart(msgspec.Struct, kw_only=True):
    #: Kind of the part. Other kinds, such as images, are refused. Bounds: text.
    type: str
    #: The text. It is required.
    text: str | None = None


class TextPart(Protocol):
    """A part of a message's content. `text` is None if parts of this type have no text."""

    type: str
    text: str | None


class CalledFunction(msgspec.Struct, kw_only=True):
    #: Name of the tool.
    name: str
    #: The arguments: the JSON text of an object.
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    #: The called function and its arguments.
    function: CalledFunction
    #: Id of the call. `tool_call_id` of the message with its result has the same value.
    id: str = ""
    #: Kind of the call. Bounds: function.
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    #: Author of the message. `developer` becomes `system` if the chat template does not mention
    #: `developer`.
    #: Bounds: ROLES.
    role: str
    #: A text, or parts of a text, which are joined with line breaks. It is required.
    content: str | list[ContentPart] | None = None
    #: Passed to the chat template.
    name: str | None = None
    #: Passed to the chat template.
    reasoning_content: str | None = None
    #: Id of the call whose result this message is. Passed to the chat template.
    tool_call_id: str | None = None
    #: Calls that the assistant has made. `content` may then be null.
    tool_calls: list[ToolCall] | None = None
    #: A non-empty `function_call` is refused, whatever its type.
    function_call: Any = None


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Check messages and return them in the form that chat templates take.

    Raises:
        RequestError: a message is invalid. `param` names the field.
    """
    _check_arguments(messages)
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return [
        _template_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def _check_arguments(messages: list[ChatMessage]) -> None:
    """Raise RequestError if the parsed arguments of all tool calls would take too much memory."""
    arguments = [
        call.function.arguments.encode(errors="replace")
        for message in messages
        for call in message.tool_calls or ()
    ]
    values, containers = count_values(
        b",".join(arguments), MAX_ARGUMENT_VALUES, MAX_ARGUMENT_CONTAINERS
    )
    if values > MAX_ARGUMENT_VALUES or containers > MAX_ARGUMENT_CONTAINERS:
        raise RequestError(
            f"the arguments of all tool calls may have at most {MAX_ARGUMENT_VALUES} JSON values, "
            f"and {MAX_ARGUMENT_CONTAINERS} arrays and objects; send a shorter conversation",
            param="messages",
            code="request_too_large",
        )


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {quote(message.role)}",
            param=f"{where}.role",
        )
    if message.function_call:
        raise RequestError(
            f"{where}.function_call is not supported by this server; use tool_calls",
            param=f"{where}.function_call",
            code="unsupported_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls needs the role assistant, got {quote(message.role)}",
            param=f"{where}.tool_calls",
        )
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    join_texts(message.content or "", f"{where}.content")


def join_texts(
    content: str | Sequence[TextPart], where: str, types: tuple[str, ...] = ("text",)
) -> str:
    """Return the text of a message's content. The texts of parts are joined with line breaks.

    Args:
        content: the text or the parts.
        where: name of the field, for errors.
        types: the types that a part may have.

    Raises:
        RequestError: a part's type is not in `types`, or a part has no text. `param` names the
            field.
    """
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in types:
            raise RequestError(
                f"{where}[{index}].type {quote(part.type)} is not supported here; use {types[0]!r}",
                param=f"{where}[{index}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise RequestError(f"{where}[{index}].text is required", param=f"{where}[{index}].text")
    return "\n".join(part.text or "" for part in content)


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take, with parsed arguments."""
    if call.type != "function":
        raise RequestError(
            f"{where}.type {quote(call.type)} is not supported by this server; use 'function'",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    try:
        arguments = json.loads(call.function.arguments or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate has no UTF-8
        is_object = isinstance(arguments, dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise RequestError(
            f"{where}.function.arguments must be the JSON text of an object",
            param=f"{where}.function.arguments",
        )
    return {
        "type": call.type,
        "id": call.id,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = message.content
    if content is not None:
        content = join_texts(content, f"{where}.content")
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "thinking": message.reasoning_content,  # the name in the template of gpt-oss
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            _template_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls or ())
        ]
        or None,
    }
    return {"role": message.role, "content": content} | {
        k: v for k, v in optional.items() if v is not None
    }
