"""What a store and its clients say to each other, and the sockets over which they do.

A message is its length (4 bytes, the most significant first) and msgpack. On one connection a client asks for one thing at a time.
Addresses are numbers: a connection is never kept waiting by a name server.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import NamedTuple, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 2**24
"""Of an answer."""
MAX_REQUEST_BYTES = 2**20
"""Short enough that reading one keeps nobody waiting."""
RECEIVE_BYTES = 2**16
"""At once."""
LENGTH = struct.Struct("!I")

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class StoreAddress(NamedTuple):
    host: str
    port: int


class Set(msgspec.Struct, tag=True):
    values: dict[str, bytes]
    """By key."""


class Get(msgspec.Struct, tag=True):
    """Answered with the values once all keys are there."""

    keys: list[str]


class Add(msgspec.Struct, tag=True):
    """To a decimal number; answered with the sum. A key that is not there counts as 0."""

    key: str
    amount: int


class Append(msgspec.Struct, tag=True):
    key: str
    value: bytes


class CompareSet(msgspec.Struct, tag=True):
    """Answered with what is there afterwards. A key that is not there is set if `expected` is empty, else answered with that."""

    key: str
    expected: bytes
    desired: bytes


class Check(msgspec.Struct, tag=True):
    """Answered with whether all keys are there."""

    keys: list[str]


class Delete(msgspec.Struct, tag=True):
    """Answered with whether the key was there."""

    key: str


class CountKeys(msgspec.Struct, tag=True):
    pass


Request = Set | Get | Add | Append | CompareSet | Check | Delete | CountKeys


class Answer(msgspec.Struct):
    values: list[bytes] = []
    number: int = 0
    error: str = ""
    """Empty: it was done."""


def frame(message: msgspec.Struct, limit: int = MAX_REQUEST_BYTES) -> bytes:
    """Raises ValueError if it is larger than `limit` bytes."""
    payload = _encoder.encode(message)
    if len(payload) > limit:
        raise ValueError(
            f"a store takes messages of at most {limit} bytes; this one has {len(payload)}"
        )
    return LENGTH.pack(len(payload)) + payload


def take_payload(data: bytearray, limit: int) -> bytes | None:
    """Removes the first message from what was received; None if not all of it is there.

    Raises:
        ValueError: it is larger than `limit` bytes.
    """
    if len(data) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(data)
    if length > limit:
        raise ValueError(
            f"a message of {length} bytes was announced; there are none of more than {limit}"
        )
    end = LENGTH.size + length
    if len(data) < end:
        return None
    payload = bytes(data[LENGTH.size : end])
    del data[:end]
    return payload


def exchange(connection: socket.socket, message: bytes, answer: type[T], deadline: float) -> T:
    """A client's question and its answer.

    Raises:
        TimeoutError: at the deadline.
        OSError, ValueError: the store is gone, or makes no sense.
    """
    connection.settimeout(left_s(deadline))
    connection.sendall(message)
    received = bytearray()
    while (payload := take_payload(received, MAX_MESSAGE_BYTES)) is None:
        connection.settimeout(left_s(deadline))
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("it has closed the connection")
        received += data
    return msgspec.msgpack.decode(payload, type=answer)


def left_s(deadline: float) -> float:
    """Raises TimeoutError if nothing is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is up")
    return left


def numeric(host: str) -> str:
    """The address of a host. Only a name is looked up. Raises OSError if nobody knows it."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def listen(host: str, port: int) -> socket.socket:
    """On one address only. Raises OSError if that is not free, or none of this host's."""
    address = numeric(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def connect(address: StoreAddress, timeout_s: float) -> socket.socket:
    """A connection over which nothing was said. Args: address: in numbers. Raises OSError if nobody listens there."""
    connection = socket.create_connection(address, timeout_s)
    if (
        connection.getsockname() == connection.getpeername()
    ):  # the kernel chose the very port that nobody listens on
        connection.close()
        raise ConnectionRefusedError(f"nobody listens at {address.host}:{address.port}")
    prepare(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    """What either side does with a new connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
