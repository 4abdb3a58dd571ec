"""Lanes over TCP in this process, and connections of somebody who says what a test wants."""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.sockets.peer_link import HELLO, encode_request
from baton_kv_transfer.transports.sockets.rows import FRAME_BYTES
from baton_kv_transfer.transports.tcp.tcp_server import Address, Hello
from baton_kv_transfer.transports.tcp.tcp_transport import TCPTransport
from baton_kv_transfer.transports.transfer import Region, Transfer, XferState
from baton_kv_transfer.transports.transport import TransportContext
from baton_kv_transfer.transports.transport_thread import TransportThread
from support.waiting import eventually

WORDS = 2**20
HEADER = struct.Struct("<IIQ")
LENGTH = FRAME_BYTES // 8
"""Words of a frame."""


def rows(words: NDArray[np.int64], *runs: tuple[int, int]) -> NDArray[np.int64]:
    """[n, 3] of (first word, number of words)."""
    return np.array(
        [[words.ctypes.data + first * 8, count * 8, 0] for first, count in runs], dtype=np.int64
    )


class TransportHere:
    """A transport in this process, with memory and what was notified to it."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self.notifs: list[tuple[str, bytes]] = []
        self.thread = TransportThread(f"transport-{name}")
        self.context = TransportContext(
            self.thread,
            name,
            host,
            lambda sender, message: self.notifs.append((sender, message)),
            lambda: None,
        )
        self.transport = TCPTransport(self.context)
        self.thread.start(self.transport.end)
        self.words = np.arange(WORDS, dtype=np.int64)
        self.region = Region(self.words.ctypes.data, self.words.nbytes)
        self.context.regions.append(self.region)

    @property
    def address(self) -> Address:
        return msgspec.msgpack.decode(self.transport.address, type=Address)

    def deregister(self) -> None:
        """Of all its memory."""
        self.context.regions.clear()
        self.thread.mailbox.call(lambda: self.transport.forget_region(self.region))

    def post(
        self,
        op: str,
        peer: str,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        notif: bytes = b"",
    ) -> Transfer:
        transfer = Transfer(op, peer, local, remote, np.zeros(len(local), dtype=np.int64), notif)
        self.transport.begin(transfer)
        return transfer


def end(transfer: Transfer) -> tuple[XferState, str]:
    eventually(lambda: transfer.state is not XferState.PROC, "end of the transfer")
    return transfer.state, transfer.error


class Raw:
    """A connection of somebody who says what a test wants."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.end.settimeout(10)

    @classmethod
    def to(cls, transport: TransportHere, name: str = "raw") -> Raw:
        """One whose hello is accepted, if it has a name."""
        raw = cls(socket.create_connection((transport.address.host, transport.address.port)))
        if name:
            raw.send(HELLO, 0, msgspec.msgpack.encode(Hello(transport.address.secret, name)))
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
