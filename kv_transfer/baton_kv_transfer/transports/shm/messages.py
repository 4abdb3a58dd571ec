"""Messages between processes of one host."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from baton_kv_transfer.transports.iovec import check, lengths_of
from baton_kv_transfer.transports.lane_protocol import encode_request


class HostAddress(msgspec.Struct, array_like=True, frozen=True):
    """What a process of the same host needs to connect."""

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: int
    cell_address: int
    cell: bytes
    socket_name: bytes


class Hello(msgspec.Struct, array_like=True):
    """First frame of a connection: the peer's cell, as proof of its metadata, and the sender's own name and cell."""

    peer_cell: bytes
    name: str
    cell_address: int
    cell: bytes


def encode_write(notif: bytes, source: bytes, target: bytes) -> bytes:
    """`source`, `target`: iovecs of runs of equal lengths."""
    return encode_request(notif, source + target)


def decode_write(request: bytes) -> tuple[bytes, bytes, bytes]:
    """(notification, source, target). Raises ValueError as `decode_request`, or if their lengths differ."""
    end = 4 + int.from_bytes(request[:4], "little")
    middle = end + (len(request) - end) // 2
    source, target = request[end:middle], request[middle:]
    check(target)
    if len(source) != len(target) or lengths_of(source).tobytes() != lengths_of(target).tobytes():
        raise ValueError("a request to write runs that are not as long as their sources")
    return request[4:end], source, target


def get_location() -> tuple[str, int, int]:
    """Boot, pid namespace and network namespace of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino
