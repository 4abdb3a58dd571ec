"""Buffers that outputs are encoded into: reused, and for large messages lent to ZMQ instead of copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

ZERO_COPY_BYTES = 32 * 2**10
"""From here on lending a buffer costs less than a copy; below, ZMQ's bookkeeping of what is lent costs more."""
MAX_BUFFERS = 32
"""Kept for reuse; a burst takes more for a while."""


class Payload:
    """One encoded message, on its way to one or more clients."""

    def __init__(self, buffer: bytearray) -> None:
        self._frame: bytearray | zmq.Frame = buffer
        self.tracker: zmq.MessageTracker | None = None
        """Tells when ZMQ is done with the buffer; None if it copies."""
        if len(buffer) >= ZERO_COPY_BYTES:
            self._frame = zmq.Frame(buffer, track=True, copy=False)
            self.tracker = self._frame.tracker

    def send(self, socket: zmq.Socket[bytes]) -> None:
        """Sends it as the last frame. Raises zmq.ZMQError."""
        socket.send(self._frame, zmq.DONTWAIT, copy=self.tracker is None)


class OutputBuffers:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._free: list[bytearray] = []
        self._lent: deque[tuple[bytearray, zmq.MessageTracker]] = deque()

    @property
    def num_lent(self) -> int:
        """Buffers that ZMQ still reads."""
        return len(self._lent)

    @contextmanager
    def encode(self, message: Any) -> Iterator[Payload]:
        """`message` as msgpack, in a buffer that is used again once all sends of the block are done."""
        self._reclaim()
        buffer = self._free.pop() if self._free else bytearray()
        self._encoder.encode_into(message, buffer)
        payload = Payload(buffer)
        yield payload  # after an exception the buffer is forgotten: somebody may still hold it
        if payload.tracker is not None:
            self._lent.append((buffer, payload.tracker))
        else:
            self._give_back(buffer)

    def _reclaim(self) -> None:
        """Takes back what ZMQ is done with. Nearly in order: messages leave in the order of their sends to each client."""
        while self._lent and self._lent[0][1].done:
            self._give_back(self._lent.popleft()[0])

    def _give_back(self, buffer: bytearray) -> None:
        if len(self._free) < MAX_BUFFERS:
            self._free.append(buffer)
