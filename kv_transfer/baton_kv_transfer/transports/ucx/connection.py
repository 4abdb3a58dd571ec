"""A connection: a UCX endpoint and the requests that use it."""

from __future__ import annotations

import ctypes as c
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.ucx import messages
from baton_kv_transfer.transports.ucx.messages import Message
from baton_kv_transfer.transports.ucx.ucx_worker import (
    RENDEZVOUS_BYTES,
    Buffer,
    UCXRequest,
    UCXWorker,
)

if TYPE_CHECKING:  # data_messages imports this module
    from baton_kv_transfer.transports.ucx.data_messages import DataMessages


class OutgoingTransfer:
    """A transfer that this side started."""

    def __init__(self, transfer: Transfer, data: DataMessages) -> None:
        self.transfer = transfer
        self.data = data
        #: Whether the peer has answered. A READ has no answer, so it waits only for its data.
        self.is_answered = transfer.op == "READ"


class UCXConnection:
    """A UCX endpoint, with the transfers and messages that use it."""

    def __init__(
        self,
        worker: UCXWorker,
        address: bytes,
        on_close: Callable[[int], None],
        bytes_moved: Counter[str],
    ) -> None:
        """Connect to a remote UCX worker.

        Args:
            worker: the local worker.
            address: address of the remote worker.
            on_close: called with this connection's `session` when UCX reports a failure.
            bytes_moved: counter of bytes by mechanism and device. This connection adds its bytes.

        Raises:
            UCXError: UCX cannot reach the address from here.
        """
        self.address = address
        self.session = secrets.randbits(64)
        self.peer_session: int | None = None  # announced by the peer's HELLO
        self.peer_name = ""
        self.is_hello_sent = False
        self.error = ""
        #: Number of the transport's ticks since something arrived, while the connection is in use.
        self.silent_ticks = 0
        self.outgoing: dict[int, OutgoingTransfer] = {}
        self.incoming: dict[int, DataMessages] = {}
        self._worker = worker
        self._bytes_moved = bytes_moved
        self._lanes = ""
        self._outbox: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._sending: bytes | None = None
        #: Number of UCX requests that use the endpoint and have not ended.
        self._num_requests = 0
        self._is_cut = False
        self._endpoint: Any = worker.connect(address, on_close, self.session)

    @property
    def is_busy(self) -> bool:
        return bool(self.outgoing or self.incoming or self._num_requests)

    def fail(self, reason: str) -> None:
        """Mark this connection as failed, so that the transport cuts it. Keep the first error."""
        self.error = self.error or reason

    def cut(self) -> None:
        """Close the endpoint by force. A transfer ends when its last UCX request has ended."""
        self._outbox.clear()
        self._is_cut = True
        self._num_requests += 1
        self._worker.disconnect(self._endpoint, self._release)
        for data in [*self.incoming.values(), *(out.data for out in self.outgoing.values())]:
            data.stop(self.error)

    def drop(self) -> None:
        """Drop the reference to the endpoint. Call this before the UCX worker is destroyed."""
        self._endpoint = None

    def send_message(self, message: Message, then: Callable[[], None] = lambda: None) -> None:
        """Send a message after all earlier messages.

        UCX alone would let a short message overtake a long one.

        Args:
            message: the message.
            then: called after the message was passed to UCX.
        """
        self._outbox.append((messages.encode(message), then))
        if self._sending is None and not self.error:
            self._send_next()

    def send(self, tag: int, buffer: Buffer, on_end: Callable[[str], None]) -> UCXRequest:
        self._num_requests += 1
        return self._worker.send(
            self._endpoint, tag, buffer, self._count_at_end(buffer.nbytes, on_end)
        )

    def receive(self, tag: int, buffer: Buffer, on_end: Callable[[str], None]) -> UCXRequest:
        self._num_requests += 1
        return self._worker.receive(tag, buffer, self._count_at_end(buffer.nbytes, on_end))

    def cancel(self, request: UCXRequest) -> None:
        self._worker.cancel(request)

    def _count_at_end(self, nbytes: int, on_end: Callable[[str], None]) -> Callable[[str], None]:
        def end(error: str) -> None:
            if not error:
                if not (self._lanes or self._is_cut):
                    self._lanes = self._worker.query_lanes(self._endpoint)
                self._bytes_moved[self._lanes or "unknown"] += nbytes
                self.silent_ticks = 0
            self._release(error)
            on_end(error)

        return end

    def _send_next(self) -> None:
        packed, then = self._outbox.popleft()
        self._sending = packed
        address = c.cast(c.c_char_p(packed), c.c_void_p).value
        assert address is not None, "a message is not empty"
        self._num_requests += 1
        buffer = Buffer.of(address, len(packed))
        self._worker.send(self._endpoint, messages.CONTROL_TAG, buffer, self._sent)
        then()

    def _sent(self, error: str) -> None:
        if not error and len(self._sending or b"") >= RENDEZVOUS_BYTES:
            self.silent_ticks = 0
        self._sending = None
        self._release(error)
        if error:
            self.fail(error)
        elif self._outbox:
            self._send_next()

    def _release(self, error: str) -> None:
        self._num_requests -= 1
        if self._is_cut and not self._num_requests:
            self.drop()
