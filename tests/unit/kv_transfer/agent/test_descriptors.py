"""Merging descriptors: the quick check for few rows, and the arrays for many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv_transfer.agent.descriptors import may_merge, merge, select
from baton_kv_transfer.transports.iovec import FEW_RUNS

BLOCK = 64


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=FEW_RUNS))
def test_few_rows_may_merge_only_if_some_are_adjacent_on_both_sides(
    pairs: list[tuple[int, int]],
) -> None:
    local, remote = (
        np.array([(block * BLOCK, BLOCK, 0) for block in side]) for side in zip(*pairs, strict=True)
    )
    regions = np.zeros(len(pairs), dtype=np.int64)
    merged, _ = merge(local.copy(), remote.copy(), regions, regions)
    assert may_merge(local, remote) is (len(merged) < len(pairs))
    assert merged[:, 1].sum() == BLOCK * len(pairs)


def test_many_rows_are_always_merged_as_arrays() -> None:
    apart = np.array([(2 * block * BLOCK, BLOCK, 0) for block in range(FEW_RUNS + 1)])
    assert may_merge(apart, apart)
    regions = np.zeros(len(apart), dtype=np.int64)
    assert len(merge(apart, apart, regions, regions)[0]) == len(apart)


@pytest.mark.parametrize("num_rows", [1, FEW_RUNS + 1])
@pytest.mark.parametrize("wrong", [-1, 100])
def test_an_index_without_a_row_is_refused(num_rows: int, wrong: int) -> None:
    descs = np.array([(block * BLOCK, BLOCK, 0) for block in range(100)])
    indices = np.arange(num_rows)
    np.testing.assert_array_equal(select(descs, indices), descs[:num_rows])
    indices[-1] = wrong
    with pytest.raises(ValueError, match="numbers from 0 to 99"):
        select(descs, indices)
