"""The server's side of one client's connection: the buffers and the pending request."""

from __future__ import annotations

import contextlib
import socket

from baton_engine.distributed.store.handshake import (
    MAX_PROOF_MESSAGE_BYTES,
    Authentication,
    Challenge,
)
from baton_engine.distributed.store.wire import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    RECEIVE_BYTES,
    StoreReply,
    frame,
    take_payload,
)


class StoreClient:
    """The server's state of one client.

    A client must read the answer to a request before it sends the next request.
    """

    def __init__(self, connection: socket.socket, address: str, secret: bytes) -> None:
        """Create the state of a new connection.

        Args:
            connection: the socket, non-blocking.
            address: host and port of the client, for log lines.
            secret: secret that the client must prove to have. Empty: clients need not authenticate.
        """
        self.socket = connection
        self.address = address
        #: None once the client is authenticated.
        self.authentication = Authentication(secret) if secret else None
        #: Keys of a pending Get.
        self.waits_for: list[str] | None = None
        #: The first key of `waits_for` that was missing at the last check.
        self.missing = ""
        self.outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def num_buffered(self) -> int:
        """Number of bytes in this client's buffers."""
        return len(self._incoming) + len(self.outgoing)

    def receive(self) -> bytes | None:
        """Read from the socket. Return the next message, or None if it is not yet complete.

        Raises:
            EOFError: the client has closed the connection.
            OSError: the connection failed.
            ValueError: the message is too long, or the client sent the message before it had
                received the answer to its previous message.
        """
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._incoming += data
        limit = MAX_REQUEST_BYTES if self.authentication is None else MAX_PROOF_MESSAGE_BYTES
        payload = None
        if self.waits_for is None and not self.outgoing:
            payload = take_payload(self._incoming, limit)
            if payload is None:
                return None
        if payload is None or self._incoming:
            raise ValueError("it sent a request before it received the last answer")
        return payload

    def send(self, answer: StoreReply | Challenge) -> None:
        """Send as much of an answer as the socket accepts. `flush` sends the remaining bytes."""
        self.outgoing += frame(answer, MAX_MESSAGE_BYTES)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
