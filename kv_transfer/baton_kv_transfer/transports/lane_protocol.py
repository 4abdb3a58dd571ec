"""What the two sides of a lane tell each other, between processes of one host and over TCP, and how far they believe it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Region
from baton_kv_transfer.transports.framed_socket import DATA
from baton_kv_transfer.transports.rows import MAX_TRANSFER_BYTES

HELLO, READ, WRITE, NOTIF, ANSWER = range(DATA + 1, DATA + 6)
"""Kinds of messages. A frame's number names the transfer that it asks for, answers, or has bytes of."""
MAX_HELLO_BYTES = 4096
FEW_ROWS = 16
"""For which Python's numbers are faster than arrays."""


class LaneAddress(msgspec.Struct, array_like=True, frozen=True):
    """What a process of the same host needs."""

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: int
    cell_address: int
    cell: bytes
    socket_name: bytes


class TCPAddress(msgspec.Struct, array_like=True, frozen=True):
    """What a process anywhere needs."""

    host: str
    port: int
    secret: bytes


class TCPHello(msgspec.Struct, array_like=True):
    """First frame of who connects over TCP."""

    secret: bytes
    """The peer's, as proof that it may."""
    name: str


class Hello(msgspec.Struct, array_like=True):
    """First frame of who connects: the peer's cell, as proof that it may, and its own name and cell."""

    peer_cell: bytes
    name: str
    cell_address: int
    cell: bytes


def permitted(tls: str | None) -> bool:
    """Whether UCX_TLS of this value allows transports of one host."""
    names = {name.strip() for name in (tls or "all").removeprefix("^").split(",")}
    if (tls or "").startswith("^"):
        return not names & {"all", "cma", "shm", "sm"}
    return bool(names & {"all", "cma", "shm", "sm"})


def count_outside(descs: NDArray[np.int64], regions: list[Region]) -> int:
    """How many rows do not lie whole in one of the regions. Safe for any numbers."""
    if len(descs) <= FEW_ROWS:
        return sum(
            not any(length > 0 and 0 <= address - r.address <= r.length - length for r in regions)
            for address, length in descs.tolist()
        )
    inside = np.zeros(len(descs), dtype=bool)
    unsigned = descs.view(np.uint64)  # what is negative, or before a region, becomes huge
    addresses, lengths = unsigned[:, 0], unsigned[:, 1]
    for region in regions:
        offsets, length = addresses - np.uint64(region.address), np.uint64(region.length)
        inside |= (offsets < length) & (lengths - np.uint64(1) < length - offsets)
    return len(descs) - int(np.count_nonzero(inside))


def encode_request(notif: bytes, rows: NDArray[np.int64]) -> bytes:
    """`rows`: [n, k]."""
    return len(notif).to_bytes(4, "little") + notif + rows.astype("<i8", copy=False).tobytes()


def decode_request(request: bytes, columns: int) -> tuple[bytes, NDArray[np.int64]]:
    """(notification, [n, columns]); the last column are lengths.

    Raises:
        ValueError: not a request, without rows, or for more than one transfer may move.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    rows = np.frombuffer(request, dtype="<i8", offset=min(end, len(request))).reshape(-1, columns)
    if not len(rows) or rows[:, -1].sum(dtype=np.float64) > MAX_TRANSFER_BYTES:
        raise ValueError(f"a request for {len(rows)} descriptors of too many bytes, or none")
    return request[4:end], rows


def encode_write(notif: bytes, local: Descriptors, remote: Descriptors) -> bytes:
    rows = np.empty((len(local), 3), dtype="<i8")
    rows[:, 0], rows[:, 1], rows[:, 2] = local[:, 0], remote[:, 0], local[:, 1]
    return encode_request(notif, rows)


def decode_write(request: bytes) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """(notification, source rows, target rows), each [n, 2]. Raises ValueError as `decode_request`."""
    notif, rows = decode_request(request, 3)
    return notif, rows[:, ::2], rows[:, 1:]


def get_location() -> tuple[str, int, int]:
    """Boot, pid namespace and network namespace of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino
