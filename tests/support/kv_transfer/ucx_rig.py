"""Lanes over UCX in this process, and workers of UCX that send what a test wants."""

from __future__ import annotations

import ctypes as c
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.transfer import Region, Transfer, XferState
from baton_kv_transfer.transports.transport import TransportContext
from baton_kv_transfer.transports.transport_thread import TransportThread
from baton_kv_transfer.transports.ucx import messages
from baton_kv_transfer.transports.ucx.ucx_transport import PeerAddress, UCXTransport
from baton_kv_transfer.transports.ucx.worker import Buffer, UCXContext
from support.waiting import eventually

WORDS = 2**20
HOST = "127.0.0.1"


def rows(words: NDArray[np.int64], *runs: tuple[int, int]) -> NDArray[np.int64]:
    """[n, 3] of (first word, number of words)."""
    return np.array(
        [[words.ctypes.data + first * 8, count * 8, 0] for first, count in runs], dtype=np.int64
    )


def end(transfer: Transfer) -> tuple[XferState, str]:
    eventually(lambda: transfer.state is not XferState.PROC, "end of the transfer")
    return transfer.state, transfer.error


class TransportHere:
    """A transport in this process, with memory and what was notified to it."""

    def __init__(self, name: str) -> None:
        self.notifs: list[tuple[str, bytes]] = []
        self.thread = TransportThread(f"transport-{name}")
        self.context = TransportContext(
            self.thread,
            name,
            HOST,
            lambda sender, message: self.notifs.append((sender, message)),
            lambda: None,
        )
        self.transport = UCXTransport(self.context)
        self.thread.start(self.transport.end)
        self.words = np.arange(WORDS, dtype=np.int64)
        self.region = Region(self.words.ctypes.data, self.words.nbytes)
        self.context.regions.append(self.region)

    @property
    def address(self) -> PeerAddress:
        return msgspec.msgpack.decode(self.transport.address, type=PeerAddress)

    def on_thread(self, function: Callable[[], Any]) -> Any:
        return self.thread.mailbox.call(function)

    def deregister(self) -> None:
        """Of all its memory."""
        self.context.regions.clear()
        self.on_thread(lambda: self.transport.forget_region(self.region))

    def num_held(self) -> int:
        """Requests that UCX holds."""
        assert self.transport._worker is not None
        return len(self.transport._worker._requests)

    def post(
        self,
        op: str,
        peer: str,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        notif: bytes = b"",
    ) -> Transfer:
        transfer = Transfer(op, peer, local, remote, np.zeros(len(local), dtype=np.int64), notif)
        assert self.transport.begin(transfer)
        return transfer


class Raw:
    """A worker of UCX that sends what a test wants, and keeps the messages that arrive."""

    def __init__(self, transport: TransportHere) -> None:
        self.worker = UCXContext(HOST).create_worker()
        self.address = msgspec.msgpack.encode(PeerAddress(self.worker.address, b"raw"))
        self.session = secrets.randbits(64)
        self._endpoint = self.worker.connect(transport.address.worker, lambda number: None, 0)
        self._kept: list[bytearray | bytes] = []
        self.received: list[messages.Message] = []
        self.sent: list[str] = []
        """Errors of what was sent, or "", in the order of their ends."""

    def send_hello(self, transport: TransportHere) -> None:
        self.send_message(
            messages.Hello(transport.address.secret, self.session, "raw", self.worker.address)
        )

    def send_message(self, message: messages.Message) -> None:
        self.send(messages.CONTROL_TAG, messages.encode(message))

    def send(self, tag: int, content: bytes) -> None:
        self._kept.append(content)
        address = c.cast(c.c_char_p(content), c.c_void_p).value
        assert address is not None
        self.worker.send(self._endpoint, tag, Buffer.of(address, len(content)), self.sent.append)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        def look() -> Any:
            self.worker.progress()
            while arrived := self.worker.probe(messages.CONTROL_TAG, 2**64 - 1):
                self._take(*arrived)
            self.worker.progress()
            return condition()

        return eventually(look, what)

    def close(self) -> None:
        self.worker.disconnect(self._endpoint, lambda error: None)
        self._endpoint = None
        self.worker.destroy()

    def _take(self, message: int, nbytes: int) -> None:
        content = bytearray(nbytes)
        self._kept.append(content)
        buffer = Buffer.of(c.addressof(c.c_char.from_buffer(content)), nbytes)
        self.worker.take(
            message, buffer, lambda error: self.received.append(messages.decode(content))
        )
