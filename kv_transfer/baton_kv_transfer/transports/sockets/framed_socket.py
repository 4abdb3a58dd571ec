"""Messages and data over a stream socket, without blocking.

Data is sent from rows of memory, and received into rows of memory. The data of a transfer is sent
in frames of the kind DATA, which carry the transfer's number. The frames of several transfers take
turns, and a message is sent before the next frame of data.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import socket
import struct
from collections import Counter
from collections.abc import Iterator

from baton_kv_transfer.transports.iovec import pack_run
from baton_kv_transfer.transports.sockets.row_io import FRAME_BYTES, Rows

#: Kind of the frames with data. All other kinds are messages.
DATA = 0
MAX_PAYLOAD_BYTES = 64 * 2**20
#: Header of a frame: size of the payload in bytes, kind, number of the transfer.
_HEADER = struct.Struct("<IIQ")
_SEND_BYTES = 2**18
#: Limit of the data moved in one call, about 1 ms of work. Other sockets are served between calls.
_MAX_BYTES_PER_CALL = 4 * 2**20
#: Size of the buffer for messages. One read usually empties the socket.
_BUFFER_BYTES = 4096
#: Maximum size of one read of a long message. The memory of a message grows with the bytes that
#: have arrived, and not with the size that the other side has announced.
_PART_BYTES = 2**18
_ZEROS = c.create_string_buffer(FRAME_BYTES)
#: Replaces the number of a stopped transfer while the rest of its frame is sent as zeros.
_STOPPED = -1


class FramedSocket:
    """One end of a connection that carries messages and data.

    One thread may run `receive` while another thread runs one of the other methods. Methods that
    send or receive raise OSError after the connection was lost.
    """

    def __init__(
        self,
        end: socket.socket,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        *,
        takes_data: bool = False,
        bytes_moved: Counter[str] | None = None,
    ) -> None:
        """Take over a connected or connecting socket.

        Args:
            end: the socket.
            max_payload_bytes: largest payload that the other side may send in a message.
            takes_data: whether the other side may send data. Data of transfers that were not passed
                to `expect` are discarded.
            bytes_moved: counter whose entry "sockets" counts the bytes of data sent and received;
                None: nothing is counted.
        """
        end.setblocking(False)
        self._end = end
        #: Largest payload in bytes that the other side may send in a message.
        self.max_payload_bytes = max_payload_bytes
        self.takes_data = takes_data
        self._bytes_moved: Counter[str] = Counter() if bytes_moved is None else bytes_moved
        self._messages = bytearray()  # to send before the next frame of data
        self._head = bytearray()  # being sent: messages, and the header of the next data
        self._sending: tuple[int, Rows] | None = None
        self._waiting: dict[int, Rows] = {}
        self._expected: dict[int, Rows] = {}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._base = c.addressof(c.c_char.from_buffer(self._buffer))
        self._read, self._filled = 0, 0  # buffer[_read:_filled] has the unread bytes
        self._frame: tuple[int, int] | None = None  # kind and number of the frame that arrives
        self._payload = bytearray()
        self._missing = 0  # bytes of this frame that have not arrived yet
        self._target: Rows | None = None

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes are left to send. If so, call `flush` when the socket is writable."""
        return bool(self._head or self._messages or self._sending or self._waiting)

    @property
    def transfers(self) -> dict[int, Rows]:
        """Rows of each transfer that has data left to send or receive, by transfer number."""
        sending = dict([self._sending] if self._sending else [])
        sending.pop(_STOPPED, None)
        return {**self._expected, **self._waiting, **sending}

    @property
    def num_unsent(self) -> int:
        """Number of bytes of messages that the socket has not accepted yet."""
        return len(self._head) + len(self._messages)

    def is_sending_last_frame(self, number: int) -> bool:
        """Return whether the last frame of a transfer's data is being sent.

        After that frame, the other side has all data of the transfer.
        """
        return (
            self._sending is not None
            and self._sending[0] == number
            and self._sending[1].is_in_last_frame
        )

    def send(self, kind: int, number: int, payload: bytes = b"", rows: Rows | None = None) -> None:
        """Send a message, followed by the data in `rows`.

        Bytes that the socket does not accept now are kept, and later calls of `flush` send them.

        Args:
            kind: kind of the message, not DATA.
            number: number of the transfer. The frames with its data carry the same number.
            payload: content of the message.
            rows: memory to send as data; None for a message alone.
        """
        message = _HEADER.pack(len(payload), kind, number) + payload
        if rows is None and not self.has_outgoing and len(message) <= _SEND_BYTES:
            sent = 0
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = self._end.send(message)
            self._head += message[sent:]
            return
        self._messages += message
        if rows is not None:
            self._waiting[number] = rows
        self.flush()

    def send_rows(self, number: int, rows: Rows) -> None:
        """Send the data in `rows` for a transfer, without a message."""
        self._waiting[number] = rows
        self.flush()

    def expect(self, number: int, rows: Rows) -> None:
        """Store the data that arrives for the transfer `number` in `rows`.

        `receive` yields a DATA frame when all rows are filled.
        """
        self._expected[number] = rows

    def stop(self, number: int) -> bool:
        """Stop using the rows of a transfer; return False if no rows were in use.

        Only the thread that runs `receive` may call this. If a part of a frame was sent, the rest
        of the frame is sent as zeros. If `is_sending_last_frame` returns True, close the connection
        instead, because the other side would mistake the zeros for data.
        """
        rows = self._expected.pop(number, None)
        if rows is not None and rows is self._target:
            self._target = None
        waiting = self._waiting.pop(number, None) is not None
        if self._sending is None or self._sending[0] != number:
            return waiting or rows is not None
        blank = Rows(pack_run(c.addressof(_ZEROS), self._sending[1].frame_missing))
        blank.begin_frame()
        self._sending = (_STOPPED, blank)
        return True

    def flush(self) -> None:
        """Send waiting bytes until the socket accepts no more, at most about 4 MiB of data."""
        num_bytes = 0
        try:
            while self.has_outgoing and num_bytes < _MAX_BYTES_PER_CALL:
                if self._sending is not None and len(self._head) <= _SEND_BYTES:
                    num_bytes += self._send_data(*self._sending)
                elif self._head:
                    self._send_head()
                else:
                    self._begin_frame()
        except (BlockingIOError, InterruptedError):
            pass

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (kind, number, payload) of each message that has arrived.

        The kind DATA means that all rows of a transfer are filled; the payload is empty then. If
        the iteration ends before the socket is empty, the socket stays readable.

        Raises:
            ConnectionError: the other side closed the connection, or sent something invalid.
        """
        num_bytes, more = 0, True
        while True:
            while (message := self._next_message()) is not None:
                more = more and message[0] != DATA  # report ended transfers before reading again
                yield message
            if not more or num_bytes >= _MAX_BYTES_PER_CALL:
                return
            try:
                received, more = self._receive_some()
            except (BlockingIOError, InterruptedError):
                return
            if not received:
                raise ConnectionError("the other side closed the connection")
            num_bytes += received

    def close(self) -> None:
        self._end.close()

    # Out

    def _begin_frame(self) -> None:
        self._head, self._messages = self._messages, bytearray()
        if self._waiting:
            number = next(iter(self._waiting))  # the transfer that has waited longest
            rows = self._waiting.pop(number)
            self._head += _HEADER.pack(rows.begin_frame(), DATA, number)
            self._sending = (number, rows)

    def _send_head(self) -> None:
        with memoryview(self._head) as head, head[:_SEND_BYTES] as part:
            sent = self._end.send(part)
        del self._head[:sent]

    def _send_data(self, number: int, rows: Rows) -> int:
        of_head, sent = rows.send(self.fileno(), self._head)
        self._bytes_moved["sockets"] += sent
        del self._head[:of_head]
        if not rows.frame_missing:
            self._sending = None
            if not rows.is_done:
                self._waiting[number] = rows
        return sent

    # In

    @property
    def _is_message(self) -> bool:
        """Whether a message is arriving. False: data is arriving, or nothing is arriving."""
        return self._frame is not None and self._frame[0] != DATA

    def _receive_some(self) -> tuple[int, bool]:
        """Read once from the socket. Return the number of bytes, and whether more may be readable.

        Call this only after `_next_message` has returned None.
        """
        if self._target is not None:
            received = self._target.receive(self.fileno())
            self._bytes_moved["sockets"] += received
            self._missing -= received
            return received, True
        if self._missing > _BUFFER_BYTES and self._is_message:
            part = self._end.recv(min(self._missing, _PART_BYTES))
            self._payload += part
            self._missing -= len(part)
            return len(part), True
        unread = self._filled - self._read  # less than one header
        self._buffer[:unread] = self._buffer[self._read : self._filled]
        self._read, self._filled = 0, unread
        received = self._end.recv_into(self._view[unread:])
        self._filled += received
        return received, self._filled == _BUFFER_BYTES

    def _next_message(self) -> tuple[int, int, bytes] | None:
        """Return the next complete message; None if more bytes must be received first."""
        while self._frame is not None or self._filled - self._read >= _HEADER.size:
            if self._frame is None:
                self._begin_incoming(*_HEADER.unpack_from(self._buffer, self._read))
                self._read += _HEADER.size
            self._use_buffer()
            if self._missing:
                return None
            assert self._frame is not None, "begun above"
            (kind, number), payload, target = self._frame, bytes(self._payload), self._target
            self._frame, self._payload, self._target = None, bytearray(), None
            if kind != DATA:
                return kind, number, payload
            if target is not None and target.is_done:
                del self._expected[number]
                return kind, number, b""
        return None

    def _use_buffer(self) -> None:
        nbytes = min(self._missing, self._filled - self._read)
        if nbytes:
            if self._is_message:
                self._payload += self._view[self._read : self._read + nbytes]
            elif self._target is not None:
                self._target.put(self._base + self._read, nbytes)
                self._bytes_moved["sockets"] += nbytes
            self._read += nbytes
            self._missing -= nbytes

    def _begin_incoming(self, nbytes: int, kind: int, number: int) -> None:
        self._frame, self._missing = (kind, number), nbytes
        if kind != DATA:
            if nbytes > self.max_payload_bytes:
                raise ConnectionError(
                    f"a message of {nbytes} bytes exceeds the limit of {self.max_payload_bytes}"
                )
            return
        if not self.takes_data or not 0 < nbytes <= FRAME_BYTES:
            raise ConnectionError(f"{nbytes} bytes of data that were not requested")
        target = self._expected.get(number)
        if target is not None:
            try:
                target.take_frame(nbytes)
            except ValueError as error:
                raise ConnectionError(str(error)) from None
        self._target = target
