"""The numbers of values and containers of a JSON text."""

from __future__ import annotations

import pytest

from baton_text.json_values import count_values


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (b"7", (0, 0)),
        (b"[]", (1, 1)),
        (b'{"a": [1, 2], "b": {}}', (7, 3)),
        (rb'["[,:{", "\\", "\"[", 1]', (4, 1)),
    ],
)
def test_punctuation_in_strings_does_not_count(text: bytes, counts: tuple[int, int]) -> None:
    assert count_values(text, *counts) == counts


def test_a_first_count_within_the_limits_includes_strings() -> None:
    assert count_values(b'["a,b"]', 9, 9) == (2, 1)


@pytest.mark.parametrize("text", [b'["', b'["a\\', b'"" "" [,,,,,,,,'])
def test_the_count_of_an_invalid_text_ends(text: bytes) -> None:
    count_values(text, 0, 0)


def test_the_count_stops_above_a_limit() -> None:
    values, _ = count_values(b'["",' + b'"",' * 100_000 + b"1]", 10, 10)
    assert 10 < values < 20
