"""Packed runs: equal results for few and many, and invalid requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv_transfer.transports import iovec
from baton_kv_transfer.transports.iovec import FEW_RUNS, RUN_BYTES
from baton_kv_transfer.transports.shm.shm_server import decode_write, encode_write
from baton_kv_transfer.transports.transfer import Region

INT64_MAX = 2**63 - 1
Runs = list[tuple[int, int]]


def pack(*runs: tuple[int, int]) -> bytes:
    return b"".join(iovec.pack_run(address, nbytes) for address, nbytes in runs)


@pytest.mark.parametrize("copies", [1, FEW_RUNS + 1])
def test_a_run_is_accepted_only_if_one_region_contains_it(copies: int) -> None:
    runs = [
        (100, 50),
        (149, 1),
        (100, 51),
        (99, 1),
        (150, 1),
        (120, 0),
        (120, -1),
        (-(2**63), 8),
        (120, INT64_MAX),
        (INT64_MAX, 1),
    ]
    regions = [Region(100, 50), Region(200, 10)]
    assert [iovec.count_outside(pack(run) * copies, regions) // copies for run in runs] == [
        0,
        0,
        *[1] * 8,
    ]
    assert iovec.count_outside(pack(*runs) * copies, regions) == 8 * copies


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.integers(1, 1000)), min_size=1, max_size=2 * FEW_RUNS
    ),
    st.integers(1, 1000),
)
def test_sums_and_pieces_equal_those_of_plain_integers(runs: Runs, max_bytes: int) -> None:
    packed = pack(*runs)
    assert packed == iovec.pack(np.array([(*run, 7) for run in runs], dtype=np.int64))
    assert iovec.total_bytes(packed) == sum(length for _, length in runs)
    assert list(iovec.lengths_of(packed)) == [length for _, length in runs]
    assert list(iovec.ends_of(packed)) == [
        sum(length for _, length in runs[: n + 1]) for n in range(len(runs))
    ]
    pieces = [
        (address + first, min(max_bytes, length - first))
        for address, length in runs
        for first in range(0, length, max_bytes)
    ]
    assert iovec.split(packed, max_bytes) == pack(*pieces)


@pytest.mark.parametrize("copies", [1, FEW_RUNS + 1])
def test_a_write_needs_sources_as_long_as_its_targets(copies: int) -> None:
    target = pack((8, 8), (64, 16)) * copies
    for source in (pack((8, 16), (64, 8)) * copies, target[:-RUN_BYTES] + pack((64, -16))):
        with pytest.raises(ValueError, match="not as long as their sources"):
            decode_write(encode_write(b"", source, target))


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(OverflowError):
        iovec.pack_run(2**64 - 1, 16)
