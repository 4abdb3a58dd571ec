"""The formats of tool calls and reasoning, by the family of the model."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_type_hints

import pytest

from baton_operator.api.spec_model import Model
from baton_protocol.options.config import REASONING_PARSERS, TOOL_PARSERS
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.tool_formats import MAX_PYTHONIC_LENGTH, TOOL_FORMATS
from support.text.replies import EXAMPLES, parse, reply


def names_of(field: str) -> set[str]:
    """Return the values that a field of the LLMService's model accepts."""
    found: set[str] = set()
    pending: list[Any] = [get_type_hints(Model)[field]]
    while pending:
        kind = pending.pop()
        if getattr(kind, "__origin__", None) is Literal:
            found |= set(get_args(kind))
        else:
            pending += get_args(kind)
    return found


def test_options_and_fields_name_all_formats() -> None:
    assert set(TOOL_PARSERS) == set(TOOL_FORMATS) == names_of("tool_parser") - {"auto"}
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
    assert names_of("reasoning_parser") == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_calls_of_every_family_are_found_in_pieces_of_any_size(
    name: str, text: str, expected: dict[str, object]
) -> None:
    options = {"tool_format": TOOL_FORMATS[name]}
    assert parse([text], **options) == expected
    assert parse(list(text), **options) == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], **options) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1]}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {a: 1}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", "a <tool_call"),
        ("hermes", "a <tool_call>"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", "  It is warm.\n"),
        ("json", "[1, 2]"),
        ("pythonic", "[x for x in y]"),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(a=f())]"),
        ("pythonic", "[1] is a list"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>add and more"),
        ("gptoss", "<|channel|>commentary to=functions.unknown json<|message|>{}"),
        ("gptoss", "<|channel|>commentary to=functions.add and more"),
        ("gptoss", "It maps to=functions."),
    ],
)
def test_a_text_that_is_no_call_is_content(name: str, text: str) -> None:
    assert parse([text], tool_format=TOOL_FORMATS[name]) == reply(text)


def test_a_very_long_list_of_python_calls_is_content() -> None:
    """Its syntax tree would take long."""
    text = f"[add(a={'1' * MAX_PYTHONIC_LENGTH})]"
    assert parse([text], tool_format=TOOL_FORMATS["pythonic"]) == reply(text)
