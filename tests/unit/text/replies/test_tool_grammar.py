"""Grammars allow what the parser of the same format finds, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from baton_text.replies.reasoning import REASONING_FORMATS
from baton_text.replies.reply_parser import ReplyParser
from baton_text.replies.tool_formats import TOOL_FORMATS
from baton_text.replies.tool_grammar import ANY_ARGUMENTS, tool_grammar

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Malmö", "Lund"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[tuple[str, dict[str, Any]]] = [("get_weather", CITY), ("add", ANY_ARGUMENTS)]
WITH_LAYOUT = sorted(name for name, each in TOOL_FORMATS.items() if each.layout)
TOKENIZER = LLTokenizer("byte")


def grammar(name: str, **options: Any) -> str | None:
    defaults = {
        "is_required": False,
        "is_single": False,
        "content_schema": None,
        "reasoning": None,
        "is_reasoning": False,
    }
    return tool_grammar(
        TOOL_FORMATS[name],
        TOOLS,
        special_token_id=lambda _: None,
        **{**defaults, **options},
    )


def allows(text: str, lark: str | None) -> bool:
    assert lark is not None
    matcher = LLMatcher(TOKENIZER, grammar_from("grammar", lark))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(name: str, *calls: tuple[str, Any]) -> str:
    """Return calls as a model of the family writes them."""
    layout = TOOL_FORMATS[name].layout
    assert layout is not None
    texts = [
        layout.begin.replace("NAME", tool) + json.dumps(arguments, ensure_ascii=False) + layout.end
        for tool, arguments in calls
    ]
    return layout.open + layout.between.join(texts) + layout.close


ONE = [("get_weather", {"city": "Malmö"})]
TWO = [*ONE, ("add", {"a": [1, {"b": "}"}]})]


@pytest.mark.parametrize("name", WITH_LAYOUT)
@pytest.mark.parametrize("is_required", [False, True])
def test_complete_calls_are_allowed_and_parsed(name: str, is_required: bool) -> None:
    if not is_required and not TOOL_FORMATS[name].markers:
        assert grammar(name) is None
        return
    lark = grammar(name, is_required=is_required)
    for calls in (ONE, TWO):
        text = written(name, *calls)
        assert allows(text, lark)
        parser = ReplyParser(
            tool_format=TOOL_FORMATS[name],
            tools=[tool for tool, _ in TOOLS],
            is_guaranteed=True,
        )
        deltas = [parser.push(character) for character in text]
        deltas.append(parser.finish(is_truncated=False))
        assert "".join(delta.content for delta in deltas) == ""
        found: list[list[str]] = []
        for call in itertools.chain.from_iterable(delta.tool_calls for delta in deltas):
            if isinstance(call.name, str):
                found.append([call.name, ""])
            found[call.index][1] += call.arguments
        assert [(tool, json.loads(arguments)) for tool, arguments in found] == calls


@pytest.mark.parametrize("name", WITH_LAYOUT)
def test_other_tools_and_arguments_are_not_allowed(name: str) -> None:
    lark = grammar(name, is_required=True)
    assert not allows(written(name, ("get_weather", {"city": "Oslo"})), lark)
    assert not allows(written(name, ("unknown", {})), lark)
    assert not allows("It is warm.", lark)
    assert not allows(written(name, *TWO), grammar(name, is_required=True, is_single=True))


@pytest.mark.parametrize("name", [each for each in WITH_LAYOUT if TOOL_FORMATS[each].markers])
def test_text_is_free_outside_of_optional_calls(name: str) -> None:
    lark = grammar(name)
    assert allows("It is {warm}, <b>or</b> [cold].", lark)
    assert allows("", lark)
    assert allows(f"Let me see.\n{written(name, *TWO)} Done.", lark)
    assert not allows(f"Let me see.\n{written(name, ('unknown', {}))}", lark)


@pytest.mark.parametrize("name", [each for each in WITH_LAYOUT if each != "llama3_json"])
def test_a_reply_without_calls_follows_the_schema_of_the_content(name: str) -> None:
    lark = grammar(name, content_schema=CITY, reasoning=REASONING_FORMATS["think"])
    assert allows('{"city": "Lund"}', lark)
    assert allows('<think>Hm.</think>\n\n{"city": "Lund"}', lark)
    assert allows(written(name, *TWO), lark)
    assert not allows('{"city": "Oslo"}', lark)
    assert not allows("It is warm.", lark)
    assert not allows(written(name, *ONE) + '{"city": "Lund"}', lark)
    assert not allows('{"city": "Lund"}', grammar(name, is_required=True, content_schema=CITY))


def test_calls_follow_the_reasoning() -> None:
    think = REASONING_FORMATS["think"]
    call = written("hermes", *ONE)
    lark = grammar("hermes", is_required=True, reasoning=think, is_reasoning=True)
    assert allows(f"Hm, <tool_call>?\n</think>\n\n{call}", lark)
    assert not allows(f"Hm.\n</think>\n\nYes. {call}", lark)
    lark = grammar("hermes", is_required=True, reasoning=think)
    assert allows(f"<think>\nHm.\n</think>\n\n{call}", lark)
    assert allows(call, lark)
    lark = grammar("hermes", reasoning=think)
    assert allows(f"<think>\nHm.\n</think>\n\nYes. {call}", lark)
    assert allows("Yes.", lark)
