"""One connection of a store's client, as the store sees it: its bytes, and what it is owed."""

from __future__ import annotations

import contextlib
import socket

from baton_engine.distributed.store.handshake import MAX_PROOF_MESSAGE_BYTES, Admission, Challenge
from baton_engine.distributed.store.wire import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    RECEIVE_BYTES,
    Answer,
    frame,
    take_payload,
)


class StoreClient:
    """One thread of a client at a time uses it: it asks, and is answered before it asks again."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        """`secret`: empty: who connects is a client."""
        self.socket = connection
        self.admission = Admission(secret) if secret else None
        """None: it is admitted."""
        self.waits_for: list[str] | None = None
        """Keys, until all are there."""
        self.missing = ""
        """The first of them that was not there when it was last looked."""
        self.outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def num_buffered(self) -> int:
        """Bytes that are kept for it."""
        return len(self._incoming) + len(self.outgoing)

    def receive(self) -> bytes | None:
        """One message, once all of it is there.

        Raises:
            EOFError: the client is gone.
            OSError: so is its connection.
            ValueError: what it sends is no request, or not its turn.
        """
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._incoming += data
        limit = MAX_REQUEST_BYTES if self.admission is None else MAX_PROOF_MESSAGE_BYTES
        payload = None
        if self.waits_for is None and not self.outgoing:
            payload = take_payload(self._incoming, limit)
            if payload is None:
                return None
        if payload is None or self._incoming:
            raise ValueError("it asks before it is answered")
        return payload

    def send(self, answer: Answer | Challenge) -> None:
        """As much as the socket takes; `flush` the rest."""
        self.outgoing += frame(answer, MAX_MESSAGE_BYTES)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
