"""Bodies of the Messages API become chat completions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton_text.requests.messages_request import ContentBlock, InputMessage, MessagesRequest
from baton_text.requests.parsing import parse_request

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


def fields_of(**options: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 200, "messages": [USER], **options}


def messages(*given: dict[str, Any]) -> list[InputMessage]:
    return msgspec.convert(given, list[InputMessage])


def test_a_body_becomes_a_chat_completion() -> None:
    body = MessagesRequest(
        max_tokens=7,
        system=[ContentBlock(type="text", text=text) for text in ("A.", "B.")],
        messages=messages(
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and then?"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "2"}],
                    },
                ],
            },
        ),
    )
    chat = body.chat_request()
    assert [message.role for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    system, _, assistant, result, user = chat.messages
    assert system.content == "A.\nB."
    assert (assistant.content, assistant.reasoning_content) == ("I add.", "Hm.")
    assert assistant.tool_calls is not None
    assert assistant.tool_calls[0].function.arguments == '{"a":1}'
    assert (result.tool_call_id, result.content, user.content) == ("c1", "2", "and then?")


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "add"},
            {"type": "function", "function": {"name": "add"}},
            True,
        ),
    ],
)
def test_a_tool_choice_becomes_that_of_a_chat_completion(
    choice: Any, expected: Any, is_parallel: bool
) -> None:
    body = json.dumps(fields_of(tools=[ADD, WEATHER], tool_choice=choice)).encode()
    chat = parse_request(body, MessagesRequest).chat_request()
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, is_parallel)
