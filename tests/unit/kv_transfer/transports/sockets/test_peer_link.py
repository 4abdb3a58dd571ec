"""The encoding of a peer link's requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv_transfer.transports import iovec
from baton_kv_transfer.transports.iovec import FEW_RUNS, MAX_TRANSFER_BYTES
from baton_kv_transfer.transports.shm.shm_server import decode_write, encode_write
from baton_kv_transfer.transports.sockets.peer_link import decode_request, encode_request


def pack(*runs: tuple[int, int]) -> bytes:
    return b"".join(iovec.pack_run(address, nbytes) for address, nbytes in runs)


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
