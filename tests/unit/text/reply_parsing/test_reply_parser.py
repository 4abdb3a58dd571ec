"""Replies are divided into reasoning, content and tool calls, for every division into pieces."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_text.reply_parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from baton_text.reply_parsing.reply_parser import ReplyParser
from baton_text.reply_parsing.tool_formats import TOOL_FORMATS
from support.text.replies import ADD, EXAMPLES, NAMES, merged, parse, reply


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_a_reply_of_a_single_call_has_only_the_first_one(
    name: str, text: str, expected: dict[str, Any]
) -> None:
    first = {**expected, "calls": expected["calls"][:1]}
    assert parse(list(text), tool_format=TOOL_FORMATS[name], is_single=True) == first


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_guaranteed_calls_are_reported_as_they_arrive(
    name: str, text: str, expected: dict[str, object]
) -> None:
    parser = ReplyParser(tool_format=TOOL_FORMATS[name], tools=NAMES, is_guaranteed=True)
    deltas = [parser.push(character) for character in text]
    deltas.append(parser.finish(is_truncated=False))
    assert merged(deltas) == expected
    for delta in deltas:
        indices = [call.index for call in delta.tool_calls]
        assert indices == sorted(set(indices))
    if name != "pythonic" and '{"arguments"' not in text and '"{' not in text:
        assert max(len(call.arguments) for delta in deltas for call in delta.tool_calls) <= 2


def test_a_valid_call_after_an_invalid_one_is_found() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> end'
    expected = reply('<tool_call>{"name":  end', ADD)
    assert parse(list(text), tool_format=TOOL_FORMATS["hermes"]) == expected


def test_a_call_that_a_limit_cuts_off_keeps_its_arguments() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    options = {"tool_format": TOOL_FORMATS["hermes"]}
    assert parse([text], is_truncated=True, **options) == reply("", ["add", '{"a": 1'])
    assert parse([text], is_truncated=False, **options) == reply(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '{"name": "add", "arguments": {"a": "\\ud800"}}'),
        ("json", '{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'),
        ("json", '{"name": "add", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}'),
        ("pythonic", '[add(a="\\ud800")]'),
    ],
)
def test_half_a_surrogate_pair_in_arguments_is_replaced(name: str, text: str) -> None:
    result = parse([text], tool_format=TOOL_FORMATS[name])
    assert result == reply("", ["add", '{"a": "\ufffd"}'])
    assert msgspec.json.encode(result)


def test_half_a_surrogate_pair_in_a_guaranteed_string_is_replaced() -> None:
    text = '{"name": "add", "parameters": "\\ud83d\\ude00 \\ud83d"}'
    result = parse([text], tool_format=TOOL_FORMATS["llama3_json"], is_guaranteed=True)
    assert result == reply("", ["add", "😀 \ufffd"])


@pytest.mark.parametrize("begin", ["a", '<tool_call>{"name": "add", "arguments": {"a": "'])
def test_the_time_of_a_piece_does_not_grow_with_the_text_held_back(begin: str) -> None:
    parser = ReplyParser(tools=NAMES, tool_format=TOOL_FORMATS["hermes"])
    parser.push(begin)
    times: list[float] = []
    for _ in range(10):
        started = time.thread_time()
        for _ in range(1000):
            parser.push(" " * 320)
        times.append(time.thread_time() - started)
    assert min(times[-3:]) < 5 * times[0]


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, reply("Yes. ", reasoning="Hm.")),
        ("Hm.\n</think>\n\nYes.", True, reply("Yes.", reasoning="Hm.")),
        ("Hm.", True, reply("", reasoning="Hm.")),
        (" Yes. ", False, reply(" Yes. ")),
        (
            '<think>a</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            False,
            reply("", ADD, reasoning="a"),
        ),
    ],
)
def test_reasoning_precedes_the_content(
    text: str, is_reasoning: bool, expected: dict[str, object]
) -> None:
    options = {
        "reasoning": REASONING_FORMATS["think"],
        "is_reasoning": is_reasoning,
        "tool_format": TOOL_FORMATS["hermes"],
    }
    assert parse([text], **options) == expected
    assert parse(list(text), **options) == expected


@pytest.mark.parametrize("has_tools", [True, False])
def test_the_channels_of_gptoss_are_reasoning_and_content(has_tools: bool) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>analysis<|message|>"
        "So.<|end|><|start|>assistant<|channel|>final<|message|>It is {warm}.<|return|>"
    )
    options = {
        "reasoning": REASONING_FORMATS["gptoss"],
        "tool_format": TOOL_FORMATS["gptoss"],
        "tools": NAMES if has_tools else (),
    }
    expected = reply("It is {warm}.", reasoning="Hm.\n\nSo.")
    assert parse([text], **options) == expected
    assert parse(list(text), **options) == expected


FRAGMENTS = st.sampled_from(
    [
        *(text for _, text, _ in EXAMPLES),
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "name"),
        *('{"name": "add"', ', "arguments": {', "}", "]", "[", "{", '"', "\\", "\n", " ", ";", ","),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "add", "(a=1)", "null", "1e5", "é", "<"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=12).map("".join)


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    text=TEXTS,
    cuts=st.lists(st.integers(0, 400), max_size=8),
    is_truncated=st.booleans(),
    reasoning=st.sampled_from([None, *REASONING_FORMATS.values()]),
    is_reasoning=st.booleans(),
    is_guaranteed=st.booleans(),
)
def test_any_text_in_any_pieces_gives_the_same_reply(
    name: str,
    text: str,
    cuts: list[int],
    is_truncated: bool,
    reasoning: ReasoningFormat | None,
    is_reasoning: bool,
    is_guaranteed: bool,
) -> None:
    options = {
        "tool_format": TOOL_FORMATS[name],
        "reasoning": reasoning,
        "is_reasoning": is_reasoning and reasoning is not None,
        "is_guaranteed": is_guaranteed,
        "is_truncated": is_truncated,
    }
    whole = parse([text], **options)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert parse(pieces, **options) == whole
    assert parse(list(text), **options) == whole
    if not is_guaranteed and not is_truncated:
        for _, arguments in whole["calls"]:  # type: ignore[attr-defined]
            assert isinstance(json.loads(arguments), dict)


@given(text=TEXTS, name=st.sampled_from(sorted(TOOL_FORMATS)))
def test_a_reply_without_calls_is_the_text(text: str, name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    for ignored in tool_format.ignored:
        text = text.replace(ignored, "")
    result = parse([text], tool_format=tool_format)
    if not result["calls"]:
        assert result["content"] == text
