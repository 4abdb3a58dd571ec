"""What processes of one host tell each other about the lane between them, and how far they believe it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Region

HELLO, WRITE, NOTIF, ANSWER = range(4)
"""Kinds of frames. A frame's number names the write that it asks for or answers."""


class LaneAddress(msgspec.Struct, array_like=True, frozen=True):
    """What a process of the same host needs."""

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: int
    cell_address: int
    cell: bytes
    socket_name: bytes


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


def find_inside(descs: NDArray[np.int64], regions: list[Region]) -> NDArray[np.bool_]:
    """Which rows lie whole in one of the regions: [n]. Safe for any numbers."""
    inside = np.zeros(len(descs), dtype=bool)
    unsigned = descs.view(np.uint64)  # what is negative, or before a region, becomes huge
    addresses, lengths = unsigned[:, 0], unsigned[:, 1]
    for region in regions:
        offsets, length = addresses - np.uint64(region.address), np.uint64(region.length)
        inside |= (offsets < length) & (lengths - np.uint64(1) < length - offsets)
    return inside


def encode_write(notif: bytes, local: Descriptors, remote: Descriptors) -> bytes:
    rows = np.column_stack((local[:, 0], remote[:, 0], local[:, 1]))
    return len(notif).to_bytes(4, "little") + notif + rows.astype("<i8").tobytes()


def decode_write(request: bytes) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """(notification, source rows, target rows), each [n, 2]. Raises ValueError: not a request, or without rows."""
    end = 4 + int.from_bytes(request[:4], "little")
    rows = np.frombuffer(request, dtype="<i8", offset=min(end, len(request))).reshape(-1, 3)
    if len(rows) == 0:
        raise ValueError("a write without descriptors")
    return request[4:end], rows[:, [0, 2]], rows[:, [1, 2]]


def get_location() -> tuple[str, int, int]:
    """Boot, pid namespace and network namespace of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino
