"""Frames over a stream socket between two processes of one host, without waiting on either side."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<IIQ")
"""Bytes of the payload, kind, number of the operation."""
MAX_PAYLOAD_BYTES = 64 * 2**20
_RECEIVE_BYTES = 2**16  # small enough for the allocator to keep


class FramedSocket:
    """One end. Methods raise ConnectionError or OSError once the connection is gone."""

    def __init__(self, end: socket.socket, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        end.setblocking(False)
        self._end = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.max_payload_bytes = max_payload_bytes
        """Longer frames of the other side are an error of its."""

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Something waits until the other side reads: call `flush` when the socket is writable."""
        return bool(self._outgoing)

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        frame = _HEADER.pack(len(payload), kind, number) + payload
        sent = 0
        if not self._outgoing:
            with contextlib.suppress(BlockingIOError):
                sent = self._end.send(frame)
        if sent < len(frame):
            self._outgoing += memoryview(frame)[sent:]
            self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._end.send(memoryview(bytes(self._outgoing[:_RECEIVE_BYTES])))]

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, number, payload) of the frames that are there.

        Raises:
            ConnectionError: the other side closed, or sent a frame that is too long.
        """
        with contextlib.suppress(BlockingIOError):
            arrived = self._end.recv(_RECEIVE_BYTES)
            if not arrived:
                raise ConnectionError("the other side closed the connection")
            self._incoming += arrived
        while len(self._incoming) >= _HEADER.size:
            length, kind, number = _HEADER.unpack_from(self._incoming)
            if length > self.max_payload_bytes:
                raise ConnectionError(f"a frame of {length} bytes is longer than {self.max_payload_bytes}")
            end = _HEADER.size + length
            if len(self._incoming) < end:
                break
            payload = bytes(self._incoming[_HEADER.size : end])
            del self._incoming[:end]
            yield kind, number, payload

    def close(self) -> None:
        self._end.close()
