"""UCX transports in this process, and scripted UCX workers. For the tests of the UCX transport."""

from __future__ import annotations

import ctypes as c
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from baton_kv_transfer.transports.ucx import messages
from baton_kv_transfer.transports.ucx.ucx_transport import PeerAddress, UCXTransport
from baton_kv_transfer.transports.ucx.ucx_worker import Buffer, UCXContext
from support.kv_transfer.transport_rig import HOST, TransportHere
from support.waiting import eventually


class UCXTransportHere(TransportHere):
    transport_class = UCXTransport
    address_class = PeerAddress

    def num_held(self) -> int:
        """Return the number of requests that UCX holds."""
        return len(self.transport._worker._requests)


class Raw:
    """A scripted UCX worker that records the messages it receives."""

    def __init__(self, transport: UCXTransportHere) -> None:
        self.worker = UCXContext(HOST).create_worker()
        self.address = msgspec.msgpack.encode(PeerAddress(self.worker.address, b"raw"))
        self.session = secrets.randbits(64)
        self._endpoint = self.worker.connect(transport.address.worker, lambda number: None, 0)
        self._kept: list[bytearray | bytes] = []
        self.received: list[messages.Message] = []
        #: Errors of sends, or "", in the order in which they ended.
        self.sent: list[str] = []

    def send_hello(self, transport: UCXTransportHere) -> None:
        self.send_message(
            messages.UCXHello(transport.address.secret, self.session, "raw", self.worker.address)
        )

    def send_message(self, message: messages.Message) -> None:
        self.send(messages.CONTROL_TAG, messages.encode(message))

    def send(self, tag: int, content: bytes) -> None:
        self._kept.append(content)
        address = c.cast(c.c_char_p(content), c.c_void_p).value
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
