"""Messages and sockets between a store and its clients.

A message is the length of its content (4 bytes, big-endian), followed by the content in msgpack. A
connection carries one request at a time. Connections use numeric addresses, so that no connection
waits for DNS.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import NamedTuple, TypeVar

import msgspec

#: Maximum size of an answer.
MAX_MESSAGE_BYTES = 2**24
#: Maximum size of a request. Other clients wait while the store reads a request.
MAX_REQUEST_BYTES = 2**20
#: Maximum size of one read from a socket.
RECEIVE_BYTES = 2**16
LENGTH = struct.Struct("!I")

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class StoreAddress(NamedTuple):
    host: str
    port: int


class Set(msgspec.Struct, tag=True):
    """Set the values of keys."""

    values: dict[str, bytes]


class Get(msgspec.Struct, tag=True):
    """Wait until all keys exist. The answer's `values` are the values of the keys."""

    keys: list[str]


class Add(msgspec.Struct, tag=True):
    """Add `amount` to the value of a key. The answer's `number` is the sum.

    The value is a decimal number as text. A missing key counts as 0.
    """

    key: str
    amount: int


class Append(msgspec.Struct, tag=True):
    """Append `value` to the value of a key. A missing key counts as empty."""

    key: str
    value: bytes


class CompareSet(msgspec.Struct, tag=True):
    """Set the value of a key to `desired` if the value equals `expected`.

    The answer's `values` contain one value: the key's value after the request. A missing key is set
    if `expected` is empty. Otherwise the key stays missing, and the answer's value is `expected`.
    """

    key: str
    expected: bytes
    desired: bytes


class Check(msgspec.Struct, tag=True):
    """Ask whether all keys exist. The answer's `number` is 1 if all exist, else 0."""

    keys: list[str]


class Delete(msgspec.Struct, tag=True):
    """Remove a key. The answer's `number` is 1 if the key existed, else 0."""

    key: str


class CountKeys(msgspec.Struct, tag=True):
    """Ask for the number of keys in the store. The answer's `number` is this number."""


Request = Set | Get | Add | Append | CompareSet | Check | Delete | CountKeys


class StoreReply(msgspec.Struct):
    values: list[bytes] = []
    number: int = 0
    #: Why the request was refused; empty if it was not.
    error: str = ""


def frame(message: msgspec.Struct, limit: int = MAX_REQUEST_BYTES) -> bytes:
    """Return the encoded message, preceded by its length.

    Raises:
        ValueError: the encoded message is longer than `limit` bytes.
    """
    payload = _encoder.encode(message)
    if len(payload) > limit:
        raise ValueError(
            f"a store accepts messages of at most {limit} bytes; this one has {len(payload)}"
        )
    return LENGTH.pack(len(payload)) + payload


def take_payload(data: bytearray, limit: int) -> bytes | None:
    """Remove the first message from the received bytes and return its content.

    Returns:
        The content without the length, or None if the message is not yet complete.

    Raises:
        ValueError: the message is longer than `limit` bytes.
    """
    if len(data) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(data)
    if length > limit:
        raise ValueError(f"the length of a message is {length} bytes; the limit is {limit}")
    end = LENGTH.size + length
    if len(data) < end:
        return None
    payload = bytes(data[LENGTH.size : end])
    del data[:end]
    return payload


def exchange(connection: socket.socket, message: bytes, answer: type[T], deadline: float) -> T:
    """Send a request and return the answer.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the store is gone.
        ValueError: the answer cannot be decoded.
    """
    connection.settimeout(left_s(deadline))
    connection.sendall(message)
    received = bytearray()
    while (payload := take_payload(received, MAX_MESSAGE_BYTES)) is None:
        connection.settimeout(left_s(deadline))
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the rendezvous store has closed the connection")
        received += data
    return msgspec.msgpack.decode(payload, type=answer)


def left_s(deadline: float) -> float:
    """Return the seconds until the deadline.

    Raises:
        TimeoutError: the deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def numeric(host: str) -> str:
    """Return the numeric address of a host. A host name is looked up in DNS.

    Raises:
        OSError: the name is unknown.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket on one address.

    Raises:
        OSError: the address is in use, or is not an address of this host.
    """
    address = numeric(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def connect(address: StoreAddress, timeout_s: float) -> socket.socket:
    """Open a connection to a numeric address.

    Raises:
        OSError: no process listens at the address.
    """
    connection = socket.create_connection(address, timeout_s)
    # The kernel may choose the target's own port as the source port and connect to itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError(f"no process listens at {address.host}:{address.port}")
    prepare(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    """Set the socket options that the store and its clients use."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
