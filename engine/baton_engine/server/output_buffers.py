"""Encodes outputs into reused buffers. Large messages are sent without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

#: Minimum size of a message that ZMQ sends without a copy. For smaller messages, a copy costs less
#: than tracking the buffer.
ZERO_COPY_BYTES = 32 * 2**10
#: Number of free buffers to keep. Further buffers are freed after use.
MAX_BUFFERS = 32


class Payload:
    """One encoded message, for one or more clients."""

    def __init__(self, buffer: bytearray) -> None:
        self._frame: bytearray | zmq.Frame = buffer
        #: Reports when ZMQ has finished with the buffer. None if ZMQ copies.
        self.tracker: zmq.MessageTracker | None = None
        if len(buffer) >= ZERO_COPY_BYTES:
            self._frame = zmq.Frame(buffer, track=True, copy=False)
            self.tracker = self._frame.tracker

    def send(self, socket: zmq.Socket[bytes]) -> None:
        """Send the payload as the last frame of a multipart message.

        Raises:
            zmq.ZMQError: the client is gone, or its queue is full.
        """
        socket.send(self._frame, zmq.DONTWAIT, copy=self.tracker is None)


class OutputBuffers:
    """Encodes messages into buffers that are reused. Not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._free: list[bytearray] = []
        #: Buffers that ZMQ still reads.
        self._lent: deque[tuple[bytearray, zmq.MessageTracker]] = deque()
        #: Number of lent buffers above which `_reclaim` checks all of them.
        self._most_lent = MAX_BUFFERS

    @contextmanager
    def encode(self, message: Any) -> Iterator[Payload]:
        """Encode `message` as msgpack, and yield the payload to send.

        After the `with` block, the buffer may be reused once ZMQ has sent the payload.
        """
        self._reclaim()
        buffer = self._free.pop() if self._free else bytearray()
        self._encoder.encode_into(message, buffer)
        payload = Payload(buffer)
        yield payload  # after an exception the buffer is dropped, because ZMQ may still read it
        if payload.tracker is not None:
            self._lent.append((buffer, payload.tracker))
        else:
            self._give_back(buffer)

    def _reclaim(self) -> None:
        """Take back sent buffers, oldest first. Stop at the first buffer that ZMQ still reads.

        A buffer for a client that does not read keeps all later buffers in `_lent`, even those that
        ZMQ has sent. If `_lent` has more than `_most_lent` buffers, the sent buffers are dropped.
        """
        while self._lent and self._lent[0][1].done:
            self._give_back(self._lent.popleft()[0])
        if len(self._lent) > self._most_lent:
            self._lent = deque(each for each in self._lent if not each[1].done)
            self._most_lent = MAX_BUFFERS + 2 * len(self._lent)

    def _give_back(self, buffer: bytearray) -> None:
        if len(self._free) < MAX_BUFFERS:
            self._free.append(buffer)
