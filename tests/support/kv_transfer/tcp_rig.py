"""TCP transports in this process, and scripted connections to them.

For the tests of the TCP transport.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.sockets.peer_link import HELLO, encode_request
from baton_kv_transfer.transports.sockets.row_io import FRAME_BYTES
from baton_kv_transfer.transports.tcp.tcp_server import Address, TCPHello
from baton_kv_transfer.transports.tcp.tcp_transport import TCPTransport
from support.kv_transfer.transport_rig import TransportHere

HEADER = struct.Struct("<IIQ")
#: Words of a frame.
LENGTH = FRAME_BYTES // 8


class TCPTransportHere(TransportHere):
    transport_class = TCPTransport
    address_class = Address


class Raw:
    """A scripted connection to a transport."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.end.settimeout(10)

    @classmethod
    def to(cls, transport: TCPTransportHere, name: str = "raw") -> Raw:
        """Connect to `transport`. If `name` is given, send a valid hello."""
        raw = cls(socket.create_connection((transport.address.host, transport.address.port)))
        if name:
            raw.send(HELLO, 0, msgspec.msgpack.encode(TCPHello(transport.address.secret, name)))
        return raw

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        self.end.sendall(HEADER.pack(len(payload), kind, number) + payload)

    def ask(self, kind: int, number: int, descs: NDArray[np.int64], notif: bytes = b"") -> None:
        self.send(kind, number, encode_request(notif, pack(descs)))

    def receive(self) -> tuple[int, int, bytes]:
        length, kind, number = HEADER.unpack(self.exactly(HEADER.size))
        return kind, number, self.exactly(length)

    def is_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self.end.recv(1) == b""
        return True

    def exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            some = self.end.recv(count - len(received))
            assert some, "the connection ended"
            received += some
        return bytes(received)
