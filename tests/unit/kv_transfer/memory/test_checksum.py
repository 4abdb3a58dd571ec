"""The block checksum, compared with its formula and with the engine's kernels."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels import block_checksum
from baton_kernels.block_checksum.reference import sum_runs_reference
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange

MASK = 2**64 - 1
HASH = b"h" * 16


def factor(k: int) -> int:
    z = (k + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def formula(words: list[int]) -> int:
    terms = (
        (x ^ (x >> 32)) * factor(i % 8192) * factor(2**32 + i // 8192) for i, x in enumerate(words)
    )
    return sum(terms) & MASK


def word_sum(words: list[int], sum_runs: checksum.SumRuns = checksum.sum_runs) -> int:
    array = np.array(words, dtype=np.uint64)
    return int(sum_runs(np.array([array.ctypes.data]), array.nbytes)[0])


def random_words(num_words: int) -> list[int]:
    return [
        int(word)
        for word in np.frombuffer(np.random.default_rng(0).bytes(8 * num_words), dtype=np.uint64)
    ]


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=100))
def test_the_sum_equals_the_documented_formula(words: list[int]) -> None:
    assert word_sum(words) == formula(words)


@pytest.mark.parametrize("num_words", [1, 8191, 8192, 8193, 3 * 8192 + 5])
def test_sums_of_the_kernels_equal_those_of_the_connector(num_words: int) -> None:
    words = random_words(num_words)
    expected = formula(words)
    with warnings.catch_warnings(action="error"):
        assert word_sum(words) == expected
    assert word_sum(words, block_checksum.sum_runs) == expected
    assert word_sum(words, sum_runs_reference) == expected


@given(
    st.integers(0, 600), st.integers(1, 400), st.lists(st.integers(0, 1000), min_size=1, max_size=5)
)
def test_sums_of_runs_at_any_offset_are_equal_in_both(
    start: int, num_words: int, offsets: list[int]
) -> None:
    data = np.array(random_words(1000), dtype=np.uint64)
    addresses = data.ctypes.data + start + np.array(offsets)
    expected = checksum.sum_runs(addresses, 8 * num_words)
    np.testing.assert_array_equal(block_checksum.sum_runs(addresses, 8 * num_words), expected)


@given(st.lists(st.integers(0, MASK), min_size=2, max_size=50), st.data())
def test_flipped_and_swapped_words_change_the_sum(words: list[int], data: st.DataObject) -> None:
    flipped = list(words)
    for position in data.draw(st.sets(st.integers(0, len(words) - 1), min_size=1, max_size=2)):
        flipped[position] ^= 1 << data.draw(st.integers(0, 63))
    assert word_sum(flipped) != word_sum(words)
    swapped = [words[1], words[0], *words[2:]]
    assert (word_sum(swapped) == word_sum(words)) == (words[0] == words[1])


def test_words_one_period_apart_have_different_weights() -> None:
    words = random_words(2 * 8192)
    swapped = [*words[8192:], *words[:8192]]
    assert word_sum(swapped) != word_sum(words)


def test_bound_checksums_differ_by_transfer_load_tokens_and_heads() -> None:
    base = {
        "transfer_id": "transfer",
        "generation": 2**63 - 1,
        "chain_hash": HASH,
        "heads": HeadRange(0, 2),
    }
    others = {
        "transfer_id": "other",
        "generation": 1,
        "chain_hash": b"g" * 16,
        "heads": HeadRange(1, 2),
    }

    def bound(word_sum: int = 7, **changes: object) -> int:
        return checksum.bind(word_sum, **(base | changes))

    assert bound() == bound()
    results = [
        bound(),
        bound(8),
        bound(heads=HeadRange(0, 1)),
        *(bound(**{name: value}) for name, value in others.items()),
    ]
    assert len(set(results)) == len(results)
    assert all(0 <= result <= MASK for result in results)
