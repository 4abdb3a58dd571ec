"""Replies in every format give the same result for every division of their text into pieces.

The texts are random, and contain whole and cut markers of their format.
"""

from __future__ import annotations

import itertools
import json
import random

from baton_text.reply_parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from baton_text.reply_parsing.reply_parser import ReplyDelta, ReplyParser
from baton_text.reply_parsing.tool_formats import TOOL_FORMATS, ToolFormat
from support.fuzz.fuzz_target import FIRST, NUM_CASES, SEED, case_rng

TOOLS = ("add", "get_weather")
ARGUMENTS = (
    *('{"a": 1}', "{}", '{"city": "Malmö", "d": [1]}', '{"a": "\\ud800"}', '{"a": "\n"}'),
    *('{"note": "a \\"}]</tool_call> b"}', '"{\\"a\\": 1}"', "null"),
)
#: Calls that differ from those of `ToolFormat.layout`.
CALLS = {
    "json": ('{"name": "add", "parameters": null}', '{"name": "add"}'),
    "pythonic": ("[add(a=1)]", "[get_weather(city='Malm\\'ö', d=[{'a': None}]), add()]"),
    "mistral": ('[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": 1}',),
    "mistral_args": ('[TOOL_CALLS] [{"arguments": "{}", "name": "add"}]',),
    "gptoss": ('to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',),
}
COMMON = (
    *("{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", ";", "=", "<", ">", "|", "\n", " "),
    *('"name": "add"', '"arguments": ', "add", "unknown", "null", "1e5", "-", "é", "😀", "\u2028"),
    *("a=1", "\\u00e4", "\x00", "Text.", "\\'", '\\"'),
)


def written(rng: random.Random, tool_format: ToolFormat) -> str:
    """Return calls as a model of the family writes them."""
    layout = tool_format.layout
    assert layout is not None
    calls = [
        layout.begin.replace("NAME", rng.choice((*TOOLS, "unknown")))
        + rng.choice(ARGUMENTS)
        + layout.end
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return layout.open + layout.between.join(calls) + layout.close


def random_text(rng: random.Random, name: str, reasoning: ReasoningFormat | None) -> str:
    """Return a random text that contains markers and calls of the format."""
    tool_format = TOOL_FORMATS[name]
    own = [*tool_format.markers, *tool_format.ignored, *tool_format.special_texts()]
    if reasoning is not None:
        own += [reasoning.start, reasoning.end]
    pieces: list[str] = []
    for _ in range(rng.randrange(9)):
        kind = rng.random()
        if kind < 0.3:
            pieces.append(rng.choice(COMMON))
        elif kind < 0.5:
            pieces.append(rng.choice(own))
        elif kind < 0.7:
            text = rng.choice(own)
            pieces.append(text[: rng.randrange(len(text))])
        elif tool_format.layout is not None and kind < 0.9:
            pieces.append(written(rng, tool_format))
        else:
            pieces.append(rng.choice(CALLS.get(name, ARGUMENTS)))
    text = "".join(pieces)
    if rng.random() < 0.2:  # up to three characters are missing
        at = rng.randrange(len(text) + 1)
        text = text[:at] + text[at + rng.randrange(4) :]
    return text


def random_pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
    return [text[start:end] for start, end in itertools.pairwise((0, *cuts, len(text)))]


def parse(parser: ReplyParser, pieces: list[str], *, is_truncated: bool) -> dict[str, object]:
    """Parse the pieces, and return the whole reply."""
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish(is_truncated=is_truncated))
    whole = ReplyDelta.join(deltas)
    calls: list[list[str]] = []
    for call in whole.tool_calls:
        if isinstance(call.name, str):
            assert call.index == len(calls)
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return {"reasoning": whole.reasoning, "content": whole.content, "calls": calls}


def check_reply(rng: random.Random) -> None:
    name = rng.choice(sorted(TOOL_FORMATS))
    tool_format = TOOL_FORMATS[name]
    family = name if name in REASONING_FORMATS else rng.choice(sorted(REASONING_FORMATS))
    reasoning = REASONING_FORMATS[family] if rng.random() < 0.6 else None
    is_reasoning = reasoning is not None and rng.random() < 0.4
    is_guaranteed, is_truncated = rng.random() < 0.3, rng.random() < 0.3
    has_tools = rng.random() < 0.9

    def parser() -> ReplyParser:
        return ReplyParser(
            reasoning=reasoning,
            is_reasoning=is_reasoning,
            tool_format=tool_format if has_tools else None,
            tools=TOOLS,
            is_guaranteed=is_guaranteed,
        )

    text = random_text(rng, name, reasoning)
    if reasoning is not None and not is_reasoning and rng.random() < 0.5:
        text = reasoning.start + text
    if reasoning is not None and rng.random() < 0.5:
        text = text.replace(" ", reasoning.end, 1)
    where = f"{name}, {reasoning}, {text!r}"
    whole = parse(parser(), [text], is_truncated=is_truncated)
    assert parse(parser(), random_pieces(rng, text), is_truncated=is_truncated) == whole, where
    assert parse(parser(), list(text), is_truncated=is_truncated) == whole, where
    for called, arguments in whole["calls"]:  # type: ignore[attr-defined]
        assert called in TOOLS, where
        if not is_guaranteed and not is_truncated:
            assert isinstance(json.loads(arguments), dict), where
    if reasoning is None and not whole["calls"]:
        own = tool_format.ignored if has_tools else ()
        if not is_guaranteed and not any(ignored in text for ignored in own):
            assert whole["content"] == text, where


def test_any_reply_in_any_pieces() -> None:
    for number in range(FIRST, FIRST + NUM_CASES):
        try:
            check_reply(case_rng("replies", number))
        except BaseException:
            print(
                f"case {number} fails; repeat with BATON_FUZZ_SEED={SEED} BATON_FUZZ_CASES=1 "
                f"BATON_FUZZ_FIRST={number}",
                flush=True,
            )
            raise
