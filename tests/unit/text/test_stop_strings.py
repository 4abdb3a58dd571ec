"""Stop strings: found across pieces, at a bounded cost."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from baton_text.requests.generation_request import MAX_STOP_CHARACTERS
from baton_text.stop_strings import StopScanner


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that ends first, and this stop string.

    Of stop strings that end together the longest counts.
    """
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=30),
    include=st.booleans(),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner = StopScanner(stops, include_stop=include)
    bounds = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    sent = ""
    expected, stop = reference(text, stops, include)
    for start, end in itertools.pairwise(bounds):
        sent += scanner.push(text[start:end])
        assert expected.startswith(sent), "a part of the stop string was sent"
    sent += scanner.flush()
    assert (sent, scanner.matched) == (expected, stop)


def test_long_stop_strings_cost_little_for_each_token() -> None:
    """Tokens of 128 characters exist. With longer stop strings, each took up to 0.85 ms."""
    spaces = " " * 128
    for stops in (
        [f"{chr(97 + number)}{' ' * 15}" for number in range(32)],
        [" " * 50 + letter + " " * 75 for letter in "abcd"],
        [" " * 250 + "b" + " " * 250],
        [" " * 380 + "b", *(f"{chr(97 + number)}   " for number in range(31))],
    ):
        assert sum(map(len, stops)) <= MAX_STOP_CHARACTERS
        scanner = StopScanner(stops)
        scanner.push(spaces * 4)
        started = time.thread_time()
        for _ in range(300):
            assert scanner.push(spaces) == spaces
        assert time.thread_time() - started < 0.6  # 0.013 s
        assert scanner.matched is None


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.push("text </e") == "text "
    assert scanner.push("x") == "</ex"
    assert scanner.push("more</end") == "more"
    assert scanner.push(">tail") == ""
    assert (scanner.matched, scanner.push("x"), scanner.flush()) == ("</end>", "", "")
