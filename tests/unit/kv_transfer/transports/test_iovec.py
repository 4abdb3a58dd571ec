"""Packed runs: equal results for few and many, and invalid requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv_transfer.transports import iovec
from baton_kv_transfer.transports.iovec import FEW_RUNS, MAX_TRANSFER_BYTES, RUN_BYTES
from baton_kv_transfer.transports.shm.shm_server import decode_write, encode_write
from baton_kv_transfer.transports.sockets.peer_link import decode_request, encode_request
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


@given(st.binary(max_size=40), st.lists(st.integers(1, 1000), min_size=1, max_size=2 * FEW_RUNS))
def test_a_request_is_decoded_as_it_was_encoded(notif: bytes, lengths: list[int]) -> None:
    source = pack(*[(n, length) for n, length in enumerate(lengths)])
    target = pack(*[(2**40 + n, length) for n, length in enumerate(lengths)])
    assert decode_request(encode_request(notif, source)) == (notif, source)
    assert decode_write(encode_write(notif, source, target)) == (notif, source, target)


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff" + pack((8, 8), (8, 8)),
        encode_request(b"no runs", b""),
        encode_request(b"half a run", pack((8, 8), (8, 8))[:-8]),
        encode_request(b"", pack((8, MAX_TRANSFER_BYTES), (8, MAX_TRANSFER_BYTES + 1))),
        encode_request(b"", pack((8, MAX_TRANSFER_BYTES // FEW_RUNS)) * 4 * FEW_RUNS),
    ],
)
def test_empty_truncated_and_oversized_requests_are_refused(request_: bytes) -> None:
    for decode in (decode_request, decode_write):
        with pytest.raises(ValueError, match="a request"):
            decode(request_)


@pytest.mark.parametrize("copies", [1, FEW_RUNS + 1])
def test_a_write_needs_sources_as_long_as_its_targets(copies: int) -> None:
    target = pack((8, 8), (64, 16)) * copies
    for source in (pack((8, 16), (64, 8)) * copies, target[:-RUN_BYTES] + pack((64, -16))):
        with pytest.raises(ValueError, match="not as long as their sources"):
            decode_write(encode_write(b"", source, target))


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(OverflowError):
        iovec.pack_run(2**64 - 1, 16)
