"""What the two sides of a lane tell each other, between processes of one host and over TCP, and how far they believe it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from baton_kv_transfer.transports.framed_socket import DATA
from baton_kv_transfer.transports.iovec import RUN_BYTES, lengths_of, total_bytes
from baton_kv_transfer.transports.rows import MAX_TRANSFER_BYTES

HELLO, READ, WRITE, NOTIF, ANSWER = range(DATA + 1, DATA + 6)
"""Kinds of messages. A frame's number names the transfer that it asks for, answers, or has bytes of."""
MAX_HELLO_BYTES = 4096


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


def encode_request(notif: bytes, iovec: bytes) -> bytes:
    return len(notif).to_bytes(4, "little") + notif + iovec


def decode_request(request: bytes) -> tuple[bytes, bytes]:
    """(notification, iovec).

    Raises:
        ValueError: not a request, without runs, or for more than one transfer may move.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    iovec = request[end:]
    _check_iovec(iovec)
    return request[4:end], iovec


def encode_write(notif: bytes, source: bytes, target: bytes) -> bytes:
    """`source`, `target`: iovecs of runs of equal lengths."""
    return encode_request(notif, source + target)


def decode_write(request: bytes) -> tuple[bytes, bytes, bytes]:
    """(notification, source, target). Raises ValueError as `decode_request`, or if their lengths differ."""
    end = 4 + int.from_bytes(request[:4], "little")
    middle = end + (len(request) - end) // 2
    source, target = request[end:middle], request[middle:]
    _check_iovec(target)
    if len(source) != len(target) or lengths_of(source).tobytes() != lengths_of(target).tobytes():
        raise ValueError("a request to write runs that are not as long as their sources")
    return request[4:end], source, target


def get_location() -> tuple[str, int, int]:
    """Boot, pid namespace and network namespace of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino


def _check_iovec(iovec: bytes) -> None:
    if not iovec or len(iovec) % RUN_BYTES:
        raise ValueError(f"a request with {len(iovec)} bytes of runs of {RUN_BYTES} bytes")
    if total_bytes(iovec) > MAX_TRANSFER_BYTES:
        raise ValueError(f"a request for more than {MAX_TRANSFER_BYTES} bytes")
