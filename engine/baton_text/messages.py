"""Checks chat messages and converts them to the form that chat templates take."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_text.errors import RequestError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ContentPart(msgspec.Struct, kw_only=True):
    #: Kind of the part. Only `text` is accepted. Other kinds, such as images, are refused.
    type: str
    #: The text. It is required.
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    #: Author of the message. Bounds: ROLES.
    role: str
    #: A text, or parts of a text, which are joined with line breaks. It is required.
    content: str | list[ContentPart] | None = None
    #: Passed to the chat template.
    name: str | None = None
    #: Passed to the chat template.
    reasoning_content: str | None = None
    #: Passed to the chat template.
    tool_call_id: str | None = None
    #: A non-empty `tool_calls` or `function_call` is refused, whatever its type.
    tool_calls: Any = None
    #: Refused like `tool_calls`.
    function_call: Any = None


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Check messages and return them in the form that chat templates take.

    Raises:
        RequestError: a message is invalid. `param` names the field.
    """
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return [_template_message(message) for message in messages]


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {message.role!r}",
            param=f"{where}.role",
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise RequestError(
                f"{where}.{name} is not supported by this server",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    if message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    if isinstance(message.content, str):
        return
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise RequestError(
                f"{where}.content[{index}].type {part.type!r} is not supported by this server; "
                "use 'text'",
                param=f"{where}.content[{index}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise RequestError(
                f"{where}.content[{index}].text is required", param=f"{where}.content[{index}].text"
            )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": content} | {
        k: v for k, v in optional.items() if v is not None
    }
