"""The bitmask allows exactly the tokens that keep the text valid, within the limits of time."""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from baton_engine.grammar import structured_output
from baton_engine.grammar.structured_output import Grammar, StructuredOutputManager
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.reply_grammar import ReplyGrammar
from baton_text.tokenizer import Tokenizer
from support.engine.grammars import EOS, TOKENIZER_SIZE, allowed, compiled, refusal

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def random_text(
    manager: StructuredOutputManager, tokenizer: Tokenizer, grammar: Grammar, seed: int
) -> str:
    """Return a text of random allowed tokens. After 40 tokens it ends at the first allowed EOS."""
    draw = random.Random(seed)
    token_ids: list[int] = []
    for _ in range(400):
        choices = allowed(manager, grammar)
        assert choices, f"no token allowed after {token_ids}"
        if choices & set(EOS) and (len(token_ids) >= 40 or choices <= set(EOS)):
            assert grammar.accept([EOS[0]])
            return tokenizer.decode(token_ids)
        token_ids.append(draw.choice(sorted(choices - set(EOS))))
        assert grammar.accept(token_ids[-1:])
    pytest.fail(f"no end after 400 tokens: {tokenizer.decode(token_ids)!r}")


def test_a_json_schema_allows_only_matching_json(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    for seed in range(5):
        value = json.loads(random_text(manager, tokenizer, compiled(manager, "json", SCHEMA), seed))
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 130


def test_json_object_allows_any_object_and_no_array(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    grammar = compiled(manager, "json_object")
    assert grammar.accept(
        tokenizer.encode('{"a": [1, {"b": null}], "c": "d"}', add_special_tokens=False)
    )
    assert grammar.is_terminated
    assert not compiled(manager, "json_object").accept(
        tokenizer.encode("[1]", add_special_tokens=False)
    )


WIDE = {"whitespace_pattern": r"\s+", "item_separator": r"\s*,\s*", "key_separator": r"\s*:\s*"}
JSON_SPECS = [
    ("json_object", ""),
    ("json", "{}"),
    ("json", "true"),
    ("json", json.dumps({"type": "object", "x-guidance": WIDE})),
]


@pytest.mark.parametrize(("kind", "spec"), JSON_SPECS)
def test_white_space_between_json_tokens_is_bounded(
    manager: StructuredOutputManager, tokenizer: Tokenizer, kind: str, spec: str
) -> None:
    for blanks in ("  ", "\t ", "\n" + " " * 64, "\r\n" + "\t" * 64):
        for text in ("{", '{"a"', '{"a":', '{"a": 1', '{"a": 1,', '{"a": [', '{"a": []'):
            grammar = compiled(manager, kind, spec)
            token_ids = tokenizer.encode(text + blanks, add_special_tokens=False)
            assert grammar.accept(token_ids), text + blanks
            following = [tokenizer.decode([token]) for token in allowed(manager, grammar)]
            assert following
            assert not [token for token in following if token[:1].isspace()], text + blanks


@pytest.mark.parametrize(("kind", "spec"), JSON_SPECS)
def test_compact_and_indented_json_is_allowed(
    manager: StructuredOutputManager, tokenizer: Tokenizer, kind: str, spec: str
) -> None:
    value: object = {"empty": {}, "none": [], "text": "a  b", "numbers": [1, 2.5, -3]}
    for _ in range(4):
        value = {"first": [value, True], "second": None}
    for text in (
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        *(json.dumps(value, indent=indent) for indent in (2, 4, "\t")),
        json.dumps(value, indent=4).replace("\n", "\r\n"),
    ):
        grammar = compiled(manager, kind, spec)
        assert grammar.accept(tokenizer.encode(text, add_special_tokens=False)), text
        assert grammar.is_terminated


def test_the_schemas_true_and_false_allow_every_and_no_json(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode('[1, "a"]', add_special_tokens=False)
    assert compiled(manager, "json", "true").accept(token_ids)
    assert "false" in refusal(manager, "json", "false")


def test_a_regex_allows_only_matching_text(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    pattern = r"[a-f]{2,5}-(cat|dog)+ é?"
    for seed in range(5):
        text = random_text(manager, tokenizer, compiled(manager, "regex", pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_a_choice_allows_only_its_strings_including_special_characters(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    choices = ['say "hi"', "a\\b\n", "naïve 日本", "/x/ | y"]
    seen = {
        random_text(manager, tokenizer, compiled(manager, "choice", json.dumps(choices)), seed)
        for seed in range(40)
    }
    assert seen == set(choices)


@pytest.mark.parametrize(
    "spec",
    [
        'start: expr\nexpr: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/',
        'root ::= num ("+" num)*\nnum ::= [0-9] [0-9]? [0-9]?',
    ],
    ids=["lark", "gbnf"],
)
def test_a_grammar_allows_only_its_sentences(
    manager: StructuredOutputManager, tokenizer: Tokenizer, spec: str
) -> None:
    for seed in range(3):
        text = random_text(manager, tokenizer, compiled(manager, "grammar", spec), seed)
        assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text), text


@pytest.mark.parametrize("is_reasoning", [True, False])
def test_the_reasoning_is_closed_after_its_budget_also_in_a_resumed_request(
    manager: StructuredOutputManager, tokenizer: Tokenizer, is_reasoning: bool
) -> None:
    writer = ReplyGrammar(
        REASONING_FORMATS["think"],
        is_reasoning=is_reasoning,
        thinking_budget=5,
        special_token_id=tokenizer.special_token_id,
    )
    spec = writer.text(None)
    token_ids = [] if is_reasoning else tokenizer.encode("<think>", add_special_tokens=False)
    start = len(token_ids)
    thought = tokenizer.encode("one, two", add_special_tokens=False)
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    token_ids += thought[:1] * 5 + closing
    grammar = compiled(manager, "grammar", spec)
    for number, token_id in enumerate([*token_ids, thought[0]]):
        resumed = compiled(manager, "grammar", spec)
        assert resumed.accept(token_ids[:number])
        choices = allowed(manager, grammar)
        assert allowed(manager, resumed) == choices
        if number == start + 5:
            assert all("</think>".startswith(tokenizer.decode([each])) for each in choices)
        elif number < start + 5:
            assert thought[0] in choices
        assert grammar.accept([token_id])
    assert EOS[0] in allowed(manager, grammar)


def test_eos_is_allowed_only_where_the_text_can_end(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    ab, c = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "c"))
    grammar = compiled(manager, "regex", "ab(c)?")
    assert not allowed(manager, grammar) & set(EOS)
    assert not compiled(manager, "regex", "ab(c)?").accept([EOS[0]])
    assert grammar.accept(ab)
    assert allowed(manager, grammar) == {*EOS, *c}
    assert not grammar.is_terminated
    assert grammar.accept(c)
    assert grammar.is_terminated
    assert allowed(manager, grammar) == set(EOS)
    ended = compiled(manager, "regex", "ab(c)?")
    assert ended.accept(ab)
    assert ended.accept([EOS[1]])
    assert ended.is_terminated
    assert allowed(manager, ended) == set(EOS)
    assert ended.accept([EOS[0]])
    assert not ended.accept(c)


def test_ids_without_a_token_are_never_allowed(manager: StructuredOutputManager) -> None:
    grammar = compiled(manager, "regex", r"(?s:.*)")
    choices = allowed(manager, grammar, vocab_size=608)
    assert len(choices) > TOKENIZER_SIZE // 2
    assert max(choices) < TOKENIZER_SIZE
    assert manager.bitmask([grammar]).shape == (1, 19)


def test_a_vocabulary_smaller_than_the_tokenizer_shortens_the_bitmask(checkpoint: Path) -> None:
    manager = StructuredOutputManager(checkpoint, 320, EOS, lambda: None)
    bitmask = manager.bitmask([compiled(manager, "regex", r"(?s:.*)")])
    assert bitmask.shape == (1, 10)
    assert bitmask.flags["C_CONTIGUOUS"]


def test_each_request_gets_its_own_bitmask_row(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    grammars = [compiled(manager, "regex", letter * 3) for letter in "abcde"]
    assert grammars[2].accept(tokenizer.encode("c", add_special_tokens=False)[:1])
    together = manager.bitmask(grammars)
    for row, grammar in enumerate(grammars):
        assert np.array_equal(together[row], manager.bitmask([grammar])[0])
    assert manager.bitmask([]).shape == (0, 19)


def test_requests_with_one_specification_do_not_share_their_state(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    first, second = (compiled(manager, "choice", '["xyz"]') for _ in range(2))
    assert first.accept(tokenizer.encode("xyz", add_special_tokens=False))
    assert first.is_terminated
    assert not second.is_terminated


def test_a_token_that_breaks_the_grammar_is_refused_with_a_reason(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    grammar = compiled(manager, "regex", "abc")
    assert not grammar.accept(tokenizer.encode("b", add_special_tokens=False))
    assert "doesn't satisfy the grammar" in grammar.error
    assert not grammar.accept([EOS[0]])
    assert allowed(manager, grammar) == set(EOS)


AMBIGUOUS = 'start: e\ne: e e e | e e | "x" | ""'


def test_a_grammar_that_takes_too_much_time_ends(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    """Without a limit each token takes longer than the one before, and all requests wait."""
    grammar = compiled(manager, "grammar", AMBIGUOUS)
    [token] = tokenizer.encode("x", add_special_tokens=False)
    started = time.thread_time()
    for _ in range(1000):
        manager.bitmask([grammar])
        if not grammar.accept([token]):
            break
    assert "too much processor time" in grammar.error
    assert not grammar.matcher.is_error(), "it ended by another limit"
    assert time.thread_time() - started < 2.0


def test_the_grammars_of_a_client_share_their_time(
    manager: StructuredOutputManager, tokenizer: Tokenizer
) -> None:
    """Otherwise the samples of one request could take a multiple of the time of one sample."""
    [token] = tokenizer.encode("x", add_special_tokens=False)
    honest = compiled(manager, "regex", "x*")
    samples = [compiled(manager, "grammar", AMBIGUOUS) for _ in range(32)]
    running = list(samples)
    started = time.thread_time()
    for _ in range(1000):
        assert honest.accept([token]), honest.error
        running = [grammar for grammar in running if grammar.accept([token])]
        if not running:
            break
    assert all("too much processor time" in grammar.error for grammar in samples)
    assert time.thread_time() - started < 2.0


def test_the_time_of_bitmasks_is_measured_after_a_slow_step(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FREE_BITMASK_S", "S_PER_BITMASK", "SLOW_ROW_S"):
        monkeypatch.setattr(structured_output, name, 1e-9)
    spec = StructuredOutput(StructuredOutputKind.REGEX, "ab+")
    before, *grammars = (manager.compile(spec, "a new client").result(30) for _ in range(3))
    monkeypatch.setattr(structured_output, "SLOW_S", math.inf)
    manager.bitmask([before])
    monkeypatch.setattr(structured_output, "SLOW_S", 0.0)
    together = manager.bitmask(grammars)
    assert [grammar.error for grammar in grammars] == ["", ""]
    assert np.array_equal(manager.bitmask(grammars), together)
    assert all("too much processor time" in grammar.error for grammar in grammars)
    monkeypatch.undo()
    manager.bitmask(grammars)
