"""Repetition detection: the output ends with one pattern, min_count times in a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.stop_rules import repeats
from baton_protocol.sampling_params import RepetitionDetection


@pytest.mark.parametrize(
    ("token_ids", "detection", "expected"),
    [
        ([1, 2, 3, 2, 3, 2, 3], RepetitionDetection(2, 2, 3), True),
        ([1, 2, 3, 2, 3, 2, 3], RepetitionDetection(2, 2, 4), False),
        ([2, 3, 2, 3, 2, 3, 9], RepetitionDetection(3, 1, 2), False),
        ([7, 7, 7], RepetitionDetection(1, 1, 3), True),
        ([7, 7], RepetitionDetection(1, 1, 3), False),
        ([7, 7, 7, 7], RepetitionDetection(4, 2, 2), True),
        ([7, 7, 7], RepetitionDetection(4, 2, 2), False),
        ([1, 2, 3, 4, 1, 2, 3, 4], RepetitionDetection(3, 1, 2), False),
        ([], RepetitionDetection(3), False),
    ],
)
def test_repeats_finds_a_pattern_at_the_end(
    token_ids: list[int], detection: RepetitionDetection, expected: bool
) -> None:
    assert repeats(token_ids, detection) is expected


@given(
    token_ids=st.lists(st.integers(0, 1), max_size=20),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    count=st.integers(2, 5),
)
def test_repeats_agrees_with_the_definition(
    token_ids: list[int], sizes: tuple[int, int], count: int
) -> None:
    smallest, largest = sorted(sizes)
    expected = any(
        len(token_ids) >= size * count
        and token_ids[len(token_ids) - size * count :] == token_ids[-size:] * count
        for size in range(smallest, largest + 1)
    )
    assert repeats(token_ids, RepetitionDetection(largest, smallest, count)) is expected


def test_repeats_reads_only_the_tokens_of_the_largest_pattern() -> None:
    num_reads = 0

    class Counted(list[int]):
        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            nonlocal num_reads
            num_reads += 1
            return 5 if index != -1 else 6

    detection = RepetitionDetection(max_pattern_size=50, min_count=4)
    assert not repeats(Counted([5] * 100_000), detection)
    assert num_reads <= 2 * 50 * 4
