"""Conversations with tools render as in transformers, in the templates of all families."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from baton_text.chat_messages import ChatMessage, template_messages
from baton_text.chat_template import ChatTemplate
from baton_text.reply_parsing.reply_format import ReplyFormat
from baton_text.reply_parsing.reply_parser import ReplyDelta, ReplyParser
from baton_text.reply_parsing.tool_formats import TOOL_FORMATS
from support.text.chat_templates import CHAT_TEMPLATES

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <b>city</b> & its name, in °C",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Malmö", "Lund's"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "1 + 2",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Malmö", "days": [1, 2]}),
    ("add", {"z": 1.5, "a": "<\"'>&", "n": None, "t": True, "m": {"k": []}}),
]
SYSTEM = {"role": "system", "content": " Be <b>brief</b>. "}
USER = {"role": "user", "content": "你好 & how warm is it?\n"}


def called(*calls: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return a message with calls, in the form of transformers."""
    made = [
        {"type": "function", "id": f"call0000{n}", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, **fields, "tool_calls": made}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}"}


ANSWER = {"role": "assistant", "content": "It is <warm>."}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "history": [SYSTEM, USER, ANSWER, USER],
    "call": [USER, called(CALLS[0]), result(0, '{"t": 20}')],
    "calls": [
        *(SYSTEM, USER, called(*CALLS), result(0, "20 °C"), result(1, '"3"')),
        *(ANSWER, USER),
    ],
    "reasoning": [
        *(USER, called(CALLS[0], reasoning_content="Hm.\n", thinking="Hm.\n"), result(0, "20")),
        *(ANSWER, USER),
    ],
    "text before the call": [USER, called(CALLS[0], content="Let me see."), result(0, "20")],
}


def sent(message: dict[str, Any]) -> ChatMessage:
    """Return a message as clients of OpenAI's API send it."""
    fields = {name: value for name, value in message.items() if name != "thinking"}
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return msgspec.convert(fields, ChatMessage)


def with_text_of_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have the text of their arguments."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return messages


def in_transformers(source: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.BPE()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=source,
    )


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_conversations_render_as_in_transformers(name: str) -> None:
    source, _, _ = CHAT_TEMPLATES[name]
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    theirs = in_transformers(source)
    rendered = set()
    variables: list[dict[str, Any]] = [
        {},
        {"enable_thinking": False},
        {"thinking": True, "reasoning_effort": "high", "date_string": "1 May 2026"},
    ]
    for (case, messages), tools, generation, extra in itertools.product(
        CONVERSATIONS.items(), (None, TOOLS), (True, False), variables
    ):
        if name.startswith("deepseek"):
            given = with_text_of_arguments(messages)
        else:
            given = messages
        expected = theirs.apply_chat_template(
            given, tools=tools, tokenize=False, add_generation_prompt=generation, **extra
        )
        prompt = ours.render(
            template_messages([sent(message) for message in messages]),
            tools=tools,
            add_generation_prompt=generation,
            **extra,
        )
        assert prompt == expected, case
        rendered.add((case, prompt))
    assert len(rendered) >= 2 * len(CONVERSATIONS), "the templates ignore the tools"


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_the_format_that_a_template_shows_reads_the_calls_that_it_renders(name: str) -> None:
    """A model repeats the format in which its template has rendered earlier calls."""
    source, begin, end = CHAT_TEMPLATES[name]
    chosen = ReplyFormat.choose("auto", "auto", source)
    assert chosen.tools is TOOL_FORMATS[name]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    several = CALLS if name != "gptoss" else CALLS[:1]
    messages = template_messages([sent(USER), sent(called(*several)), sent(result(0, "20"))])
    prompt = template.render(messages[:1], tools=TOOLS, add_generation_prompt=False) + begin
    history = template.render(messages, tools=TOOLS, add_generation_prompt=False)
    assert history.startswith(prompt)
    text = history[len(prompt) :].partition(end)[0]
    parser = ReplyParser(tool_format=chosen.tools, tools=[tool for tool, _ in CALLS])
    whole = ReplyDelta.join([parser.push(text), parser.finish(is_truncated=False)])
    found = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
    assert found == several, text
    assert whole.content.strip() == ""
