"""Random bytes for the servers of the KV transports tcp and shm: hello, requests and data."""

from __future__ import annotations

import random
import struct

from baton_kv_transfer.transports.iovec import pack_run
from baton_kv_transfer.transports.shm.shm_server import encode_write
from baton_kv_transfer.transports.sockets.framed_socket import DATA, MAX_PAYLOAD_BYTES
from baton_kv_transfer.transports.sockets.peer_link import (
    ANSWER,
    HELLO,
    NOTIF,
    READ,
    WRITE,
    encode_request,
)
from support.fuzz.mutations import mutate_bytes

HEADER = struct.Struct("<IIQ")
KINDS = (DATA, HELLO, READ, WRITE, NOTIF, ANSWER, 99, 2**32 - 1)
#: Lengths of runs that are longer than any memory, empty or negative.
ODD_LENGTHS = (0, -1, -(2**62), 2**23 - 2**44, 2**44, 2**62, 2**63 - 1)
#: WRITEs of up to this size are followed by their data.
SMALL_BYTES = 2**16


class TransportCases:
    """Makes the bytes of connections to one server.

    Args:
        hello: payload of a valid HELLO.
        address: address of the server's registered memory.
        num_bytes: size of this memory.
        source: address of as many bytes of this process, from which the transport shm copies. None:
            the transport tcp.
    """

    def __init__(
        self, hello: bytes, address: int, num_bytes: int, source: int | None = None
    ) -> None:
        self._hello = hello
        self._address = address
        self._num_bytes = num_bytes
        self._source = source

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.03:
            return rng.randbytes(rng.choice((1, 15, 16, 17, 5000)))
        hello = self._hello if rng.random() < 0.85 else mutate_bytes(self._hello, rng)
        data = _frame(HELLO, 0, hello, rng)
        for number in range(rng.choice((0, 1, 1, 2, 6, 30))):
            data += self._message(number if rng.random() < 0.9 else rng.getrandbits(64), rng)
        kind = rng.random()
        if kind < 0.2:
            return mutate_bytes(data, rng)
        return data[: rng.randrange(len(data))] if kind < 0.35 else data

    def _message(self, number: int, rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.15:
            notif = rng.randbytes(rng.choice((0, 1, 50, 5000)))
            return _frame(NOTIF, number, notif, rng)
        if kind < 0.25:
            payload = rng.randbytes(rng.choice((0, 1, 50, 5000)))
            return _frame(rng.choice(KINDS), number, payload, rng)
        runs = self._runs(self._address, rng)
        if kind < 0.5 and self._source is None:
            return _frame(READ, number, self._request(runs, rng), rng)
        return self._write(number, runs, rng)

    def _write(self, number: int, runs: list[tuple[int, int]], rng: random.Random) -> bytes:
        data = _frame(WRITE, number, self._request(runs, rng), rng)
        num_bytes = sum(length for _, length in runs)
        if self._source is None and 0 < num_bytes <= SMALL_BYTES and rng.random() < 0.8:
            data += _frame(DATA, number, rng.randbytes(num_bytes), rng)
        return data

    def _request(self, runs: list[tuple[int, int]], rng: random.Random) -> bytes:
        notif = rng.randbytes(rng.choice((0, 0, 20)))
        target = b"".join(pack_run(*run) for run in runs)
        if self._source is None:
            request = encode_request(notif, target)
        else:
            shift = self._source - self._address if rng.random() < 0.9 else 0
            source = b"".join(pack_run(_clip(address + shift), length) for address, length in runs)
            request = encode_write(notif, source, target)
        return mutate_bytes(request, rng) if rng.random() < 0.15 else request

    def _runs(self, address: int, rng: random.Random) -> list[tuple[int, int]]:
        """Return (address, length) of each run. Three of five requests have valid runs only."""
        is_valid = rng.random() < 0.6
        runs = []
        for _ in range(rng.choice((1, 1, 2, 17, 300))):
            offset = rng.randrange(self._num_bytes)
            length = rng.randrange(1, min(512, self._num_bytes - offset) + 1)
            kind = 0.0 if is_valid else rng.random()
            if kind > 0.9:
                offset = rng.choice((-1, self._num_bytes, -address, 2**62))
            elif kind > 0.8:
                length = rng.choice(ODD_LENGTHS)
            runs.append((_clip(address + offset), length))
        return runs


def _frame(kind: int, number: int, payload: bytes, rng: random.Random) -> bytes:
    """Return a frame. One in thirty announces another length."""
    length = len(payload)
    if rng.random() < 0.03:
        odd = (0, length + 1, max(0, length - 1), 2**20, MAX_PAYLOAD_BYTES, 2**32 - 1)
        length = rng.choice(odd)
    return HEADER.pack(length, kind, number) + payload


def _clip(address: int) -> int:
    return max(-(2**63), min(address, 2**63 - 1))
