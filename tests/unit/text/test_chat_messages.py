"""Chat messages: the memory of tool calls' arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_text import chat_messages
from baton_text.chat_messages import (
    MAX_ARGUMENT_CONTAINERS,
    MAX_ARGUMENT_VALUES,
    CalledFunction,
    ChatMessage,
    ToolCall,
    template_messages,
)
from baton_text.request_error import RequestError


def conversation(*arguments: str) -> list[ChatMessage]:
    """Return a conversation with one message for each call."""
    return [
        ChatMessage(
            role="assistant",
            tool_calls=[ToolCall(function=CalledFunction(name="f", arguments=each))],
        )
        for each in arguments
    ]


@pytest.mark.parametrize(
    ("part", "number"),
    [("[],", MAX_ARGUMENT_CONTAINERS // 2), ("0,", MAX_ARGUMENT_VALUES // 2)],
    ids=["containers", "values"],
)
def test_arguments_with_many_values_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, part: str, number: int
) -> None:
    arguments = f'{{"a":[{part * number}0]}}'
    [message] = template_messages(conversation(arguments))
    assert len(message["tool_calls"][0]["function"]["arguments"]["a"]) == number + 1

    def loads(*_: Any) -> None:
        raise AssertionError("the arguments were parsed")

    monkeypatch.setattr(chat_messages.json, "loads", loads)
    with pytest.raises(RequestError) as caught:
        template_messages(conversation(arguments, arguments))
    assert (caught.value.param, caught.value.code) == ("messages", "request_too_large")


def test_punctuation_in_the_strings_of_arguments_is_not_counted() -> None:
    text = "[{,:" * MAX_ARGUMENT_CONTAINERS
    [message] = template_messages(conversation(json.dumps({"file": text})))
    assert message["tool_calls"][0]["function"]["arguments"] == {"file": text}
