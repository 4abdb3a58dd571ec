"""Pieces of tokens add up to the text, and end at whole characters."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton_text.detokenizer import IncrementalDetokenizer
from support.text.tokenizers import tokenizer


def pieces_of(kind: str, ids: list[int], cuts: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=skip)
    bounds = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 399), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=40),
    skip=st.booleans(),
)
def test_pieces_of_any_tokens_add_up_to_the_whole_text(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Random tokens of a byte-level vocabulary are mostly invalid UTF-8."""
    whole = tokenizer("byte_level").decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of("byte_level", ids, cuts, skip=skip)) == whole
    assert "".join(pieces_of("byte_level", ids, list(range(len(ids))), skip=skip)) == whole


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 274), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=30)
)
@example(ids=[3, 270, 131], cuts=[2])  # an id without a token inside a run of bytes
def test_pieces_of_byte_fallback_tokens_add_up_to_the_whole_text(
    ids: list[int], cuts: list[int]
) -> None:
    whole = tokenizer("byte_fallback").decode(ids)
    assert "".join(pieces_of("byte_fallback", ids, cuts)) == whole


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), kind=st.sampled_from(["byte_level", "byte_fallback"]))
def test_no_piece_ends_inside_a_character(text: str, kind: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    whole = tokenizer(kind).decode(ids)
    pieces = pieces_of(kind, ids, list(range(len(ids))))
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


def test_the_window_stays_small_for_invalid_bytes() -> None:
    kind = tokenizer("byte_level")
    broken = next(i for i in range(kind.vocab_size) if kind.token_bytes(i) == b"\x80")
    detokenizer = IncrementalDetokenizer(kind)
    text = "".join(detokenizer.push([broken]) for _ in range(500)) + detokenizer.flush()
    assert text == "\ufffd" * 500
    assert len(detokenizer._window) < 40
