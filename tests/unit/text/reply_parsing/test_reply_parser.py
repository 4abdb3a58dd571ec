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
from baton_text.reply_parsing.reply_parser import ReplyDelta, ReplyParser
from baton_text.reply_parsing.text_reader import Reading, TextReader
from baton_text.reply_parsing.tool_formats import MAX_PYTHONIC_LENGTH, TOOL_FORMATS

NAMES = ("get_weather", "add")
WEATHER = '{"city": "Malmö", "days": [1, 2], "note": "a \\"}]<tool_call> b"}'


def parse(pieces: list[str], *, is_truncated: bool = False, **options: object) -> dict[str, object]:
    """Parse the pieces, and return the whole reply."""
    parser = ReplyParser(**{"tools": NAMES, **options})  # type: ignore[arg-type]
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish(is_truncated=is_truncated))
    return merged(deltas)


def merged(deltas: list[ReplyDelta]) -> dict[str, object]:
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if isinstance(call.name, str):
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return {
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "content": "".join(delta.content for delta in deltas),
        "calls": calls,
    }


def reply(content: str = "", *calls: list[str], reasoning: str = "") -> dict[str, object]:
    return {"reasoning": reasoning, "content": content, "calls": list(calls)}


CALL = ["get_weather", WEATHER]
ADD = ["add", '{"a": 1}']
EXAMPLES: list[tuple[str, str, dict[str, object]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        reply("", CALL),
    ),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n',
        reply("Let me see.", CALL, ADD),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        reply("", ADD),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', reply("", ["add", "{}"])),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', reply("", CALL)),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        reply("", ADD, ADD),
    ),
    (
        "json",
        '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
        reply("", ADD, ADD),
    ),
    (
        "pythonic",
        "[add(a=1), get_weather(city='Malmö', days=[1, 2], note='a \"}]<tool_call> b')]",
        reply("", ADD, CALL),
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', reply("", ADD)),
    (
        "mistral",
        f'Sure.[TOOL_CALLS]add[ARGS]{{"a": 1}}[TOOL_CALLS]get_weather{WEATHER}',
        reply("Sure.", ADD, CALL),
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n'
        f"```json\n{WEATHER}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reply("", ADD, CALL),
    ),
    (
        "deepseek_v3",
        'Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reply("Well.", ADD),
    ),
    (
        "gptoss",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{WEATHER}<|call|>",
        reply("", CALL),
    ),
    (
        "gptoss",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        reply("", ADD),
    ),
    (
        "gptoss",
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}',
        reply("I add.", ADD),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_calls_of_every_family_are_found_in_pieces_of_any_size(
    name: str, text: str, expected: dict[str, object]
) -> None:
    options = {"tool_format": TOOL_FORMATS[name]}
    assert parse([text], **options) == expected
    assert parse(list(text), **options) == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], **options) == expected


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


def test_a_reply_of_markers_is_read_in_one_pass() -> None:
    """The time grew with the square of their number: 3 s for 16,000 markers."""
    reader, markers = TextReader(), ("<|end|>", "<|call|>")
    reader.push("".join(markers) * 8000)
    reader.has_ended = True
    found: list[str] = []

    def read() -> Reading[None]:
        while marker := (yield from reader.read_until(markers, lambda text: None)):
            found.append(marker)

    started = time.thread_time()
    assert not list(read())
    assert time.thread_time() - started < 1.0
    assert found == [*markers] * 8000
