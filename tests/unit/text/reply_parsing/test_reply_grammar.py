"""Grammars allow what the parser of the same format finds, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.reply_grammar import ANY_ARGUMENTS, ReplyGrammar
from baton_text.reply_parsing.reply_parser import ReplyParser
from baton_text.reply_parsing.tool_formats import TOOL_FORMATS
from baton_text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Malmö", "Lund"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[tuple[str, dict[str, Any]]] = [("get_weather", CITY), ("add", ANY_ARGUMENTS)]
WITH_LAYOUT = sorted(name for name, each in TOOL_FORMATS.items() if each.layout)
WITH_FREE_TEXT = [
    name
    for name in WITH_LAYOUT
    if TOOL_FORMATS[name].markers and not TOOL_FORMATS[name].marks_content
]
TOKENIZER = LLTokenizer("byte")


def grammars(
    reasoning: str | None = None, *, is_reasoning: bool = False, budget: int | None = None
) -> ReplyGrammar:
    return ReplyGrammar(
        None if reasoning is None else REASONING_FORMATS[reasoning],
        is_reasoning=is_reasoning,
        thinking_budget=budget,
        special_token_id=lambda _: None,
    )


def grammar(
    name: str,
    writer: ReplyGrammar | None = None,
    *,
    is_required: bool = False,
    is_single: bool = False,
    content_schema: dict[str, Any] | None = None,
) -> str | None:
    return (writer or grammars()).calls(
        TOOL_FORMATS[name],
        TOOLS,
        is_required=is_required,
        is_single=is_single,
        content_schema=content_schema,
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
    tool_format = TOOL_FORMATS[name]
    if not is_required and (not tool_format.markers or tool_format.marks_content):
        assert grammar(name) is None
        return
    lark = grammar(name, is_required=is_required)
    assert tool_format.layout is not None
    for calls in (ONE, TWO) if tool_format.layout.between else (ONE,):
        text = written(name, *calls)
        assert allows(text, lark)
        parser = ReplyParser(
            tool_format=tool_format,
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


@pytest.mark.parametrize("name", WITH_FREE_TEXT)
def test_text_is_free_outside_of_optional_calls(name: str) -> None:
    lark = grammar(name)
    assert allows("It is {warm}, <b>or</b> [cold].", lark)
    assert allows("", lark)
    assert allows(f"Let me see.\n{written(name, *TWO)} Done.", lark)
    assert not allows(f"Let me see.\n{written(name, ('unknown', {}))}", lark)


@pytest.mark.parametrize("name", WITH_FREE_TEXT)
def test_text_has_no_second_call_without_parallel_calls(name: str) -> None:
    """The markers of calls are plain text here, so that free text could have them."""
    lark = grammar(name, is_single=True)
    one = written(name, *ONE)
    assert allows(f"Let me see.\n{one} Done.", lark)
    assert allows("It is {warm}, <b>or</b> [cold].", lark)
    assert not allows(written(name, *TWO), lark)
    assert not allows(f"{one}\n{one}", lark)
    for marker in TOOL_FORMATS[name].markers:
        assert not allows(f"It is warm {marker}", lark)
        assert not allows(f"{one} {marker}", lark)


@pytest.mark.parametrize("name", [each for each in WITH_LAYOUT if each != "llama3_json"])
def test_a_reply_without_calls_follows_the_schema_of_the_content(name: str) -> None:
    lark = grammar(name, grammars("think"), content_schema=CITY)
    layout = TOOL_FORMATS[name].layout
    assert layout is not None
    before = layout.content
    assert allows(before + '{"city": "Lund"}', lark)
    assert allows(f'<think>Hm.</think>\n\n{before}{{"city": "Lund"}}', lark)
    assert allows(written(name, *ONE), lark)
    assert not allows(before + '{"city": "Oslo"}', lark)
    assert not allows("It is warm.", lark)
    assert not allows(written(name, *ONE) + '{"city": "Lund"}', lark)
    assert not allows('{"city": "Lund"}', grammar(name, is_required=True, content_schema=CITY))


def test_calls_follow_the_reasoning() -> None:
    call = written("hermes", *ONE)
    lark = grammar("hermes", grammars("think", is_reasoning=True), is_required=True)
    assert allows(f"Hm, <tool_call>?\n</think>\n\n{call}", lark)
    assert not allows(f"Hm.\n</think>\n\nYes. {call}", lark)
    lark = grammar("hermes", grammars("think"), is_required=True)
    assert allows(f"<think>\nHm.\n</think>\n\n{call}", lark)
    assert allows(call, lark)
    lark = grammar("hermes", grammars("think"))
    assert allows(f"<think>\nHm.\n</think>\n\nYes. {call}", lark)
    assert allows("Yes.", lark)


CITIES = '{"city": "Lund"}'
STRUCTURES = [
    (StructuredOutput(StructuredOutputKind.JSON, json.dumps(CITY)), CITIES, '{"city": "Oslo"}'),
    (StructuredOutput(StructuredOutputKind.JSON, "true"), "[1]", "[1"),
    (StructuredOutput(StructuredOutputKind.JSON_OBJECT), '{"a": 1}', "[1]"),
    (StructuredOutput(StructuredOutputKind.CHOICE, '["a\\n\\"b", "/c"]'), 'a\n"b', "a"),
    (StructuredOutput(StructuredOutputKind.REGEX, r"a/b\/[/c]+\n\d"), "a/b/c/\n1", "a/b/c/1"),
    (StructuredOutput(StructuredOutputKind.REGEX, 'x\n("|#)'), 'x\n"', "x"),
]


@pytest.mark.parametrize(("output", "right", "wrong"), STRUCTURES)
def test_a_structured_output_begins_after_the_reasoning(
    output: StructuredOutput, right: str, wrong: str
) -> None:
    lark = grammars("think", is_reasoning=True).structured(output, TOOL_FORMATS["hermes"])
    assert allows(f"Hm, {wrong}?\n</think>\n\n{right}", lark)
    assert not allows(f"Hm.</think>\n\n{wrong}", lark)
    assert not allows(right, lark)
    lark = grammars("think").structured(output, TOOL_FORMATS["hermes"])
    assert allows(f"<think>\n{wrong}</think>\n{right}", lark)
    assert allows(right, lark)
    assert not allows(wrong, lark)


def closes_after(text: str, lark: str | None, closing: str, *, start: str = "") -> int:
    """Return the number of tokens of `text` after which only `closing` is allowed."""
    assert lark is not None
    matcher = LLMatcher(TOKENIZER, grammar_from("grammar", lark))
    assert matcher.consume_tokens(TOKENIZER.tokenize_str(start))
    for number, token in enumerate(TOKENIZER.tokenize_str(text)):
        forced = matcher.compute_ff_bytes().decode()
        if forced:
            assert forced.startswith(closing)
            return number
        assert matcher.consume_token(token), f"{text[:number]!r}: {matcher.get_error()}"
    raise AssertionError("it is never closed")


@pytest.mark.parametrize("budget", [0, 1, 7, 50])
@pytest.mark.parametrize("family", sorted(REASONING_FORMATS))
def test_the_reasoning_is_closed_after_its_budget(family: str, budget: int) -> None:
    form = REASONING_FORMATS[family]
    long = "Let me think about <think> and [this].\n" * 9
    tools = TOOL_FORMATS["gptoss" if family == "gptoss" else "hermes"]
    inside = grammars(family, is_reasoning=True, budget=budget)
    outside = grammars(family, budget=budget)
    larks = [
        (inside.text(tools), outside.text(tools)),
        (inside.structured(STRUCTURES[0][0], tools), outside.structured(STRUCTURES[0][0], tools)),
        *(
            tuple(
                each.calls(
                    tools, TOOLS, is_required=is_required, is_single=False, content_schema=schema
                )
                for each in (inside, outside)
            )
            for is_required, schema in ((False, None), (True, None), (False, CITY))
        ),
    ]
    for within, after in larks:
        assert closes_after(long, within, form.end) == budget
        assert closes_after(long, after, form.end, start=form.start) == budget


def test_a_short_reasoning_ends_before_its_budget_and_happens_once() -> None:
    call = written("hermes", *ONE)
    for lark in (
        grammars("think", budget=20).text(None),
        grammar("hermes", grammars("think", budget=20)),
    ):
        assert allows("<think>Hm.</think>\n\nYes, </think>.", lark)
        assert allows("<think></think>Yes.", lark)
        assert allows("Yes.", lark)
        assert allows("", lark)
        assert not allows("Yes. <think>", lark)
        assert not allows("<think>Hm.</think> Yes. <think>", lark)
        assert not allows("<think>", lark)
    lark = grammar("hermes", grammars("think", budget=20))
    assert allows(f"<think>Hm.</think>\n\nYes.{call}", lark)
    assert not allows(f"<think>Hm.</think>\n\n<think>{call}", lark)


def test_a_budget_counts_tokens_and_not_characters() -> None:
    lark = grammars("think", is_reasoning=True, budget=3).text(None)
    assert closes_after("äöü" * 9, lark, "</think>") == 3


def test_gptoss_writes_one_call_or_a_final_message() -> None:
    start, end = REASONING_FORMATS["gptoss"].start, "<|end|><|start|>assistant"
    call = written("gptoss", *ONE)
    lark = grammar("gptoss", grammars("gptoss", budget=90))
    assert allows(f"{start}Hm.{end}{call}", lark)
    assert allows(f"{start}Hm.{end}<|channel|>final<|message|>It is warm.", lark)
    assert not allows(f"{start}Hm.{end}{start}Hm.{end}{call}", lark)
    assert not allows(f"{start}Hm.{end}It is warm.", lark)
    assert grammar("gptoss", grammars("gptoss")) is None


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("is_required", [True, False])
def test_a_call_may_begin_with_an_added_token_that_is_not_marked_as_special(
    is_marked, is_required
) -> None:
    """Qwen3 has added tokens for <tool_call> and </tool_call>, with `special: false`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    texts = ("<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(text, special=is_marked, normalized=False) for text in texts])
    tokenizer = Tokenizer(backend, {})
    writer = ReplyGrammar(
        None,
        is_reasoning=False,
        thinking_budget=None,
        special_token_id=tokenizer.special_token_id,
    )
    lark = grammar("hermes", writer, is_required=is_required)
    assert lark is not None
    end = tokenizer.token_id("<|im_end|>")
    matcher = LLMatcher(LLTokenizer(backend.to_str(), eos_token=end), grammar_from("grammar", lark))
    tokens = tokenizer.encode(written("hermes", *TWO))
    assert tokens[0] == tokenizer.token_id("<tool_call>")
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
