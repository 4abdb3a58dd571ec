"""The data of a transfer as tag messages, one message for each piece of up to 512 KiB.

Both sides cut the data into the same pieces. UCX sends a piece directly from the rows of memory,
and receives it directly into the rows.
"""

from __future__ import annotations

import ctypes as c
from bisect import bisect_right
from collections.abc import Callable

from baton_kv_transfer.transports.iovec import RUN_BYTES, ends_of, split
from baton_kv_transfer.transports.ucx import messages
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from baton_kv_transfer.transports.ucx.ucx_worker import Buffer, UCXRequest

#: Maximum size of a piece. A piece fits into UCX's receive segment (TCP_RX_SEG_SIZE). UCX copies
#: larger messages before sending them.
PIECE_BYTES = 2**19
_PIECE_ROWS = 1024
#: Number of pieces of one transfer that are sent at the same time, so that transfers take turns.
WINDOW = 8


class Pieces:
    """Rows of memory, cut into pieces. Rows of the same lengths are cut at the same points."""

    def __init__(self, iovec: bytes) -> None:
        self.iovec = iovec
        rows = bytearray(split(iovec, PIECE_BYTES))
        ends = ends_of(rows)
        self._rows = c.c_char.from_buffer(rows)
        self._address = c.addressof(self._rows)
        self._cuts = [0]
        #: Number of bytes before each cut. `_cuts` has the number of rows before each cut.
        self._bytes = [0]
        while self._cuts[-1] < len(ends):
            end = bisect_right(ends, self._bytes[-1] + PIECE_BYTES, self._cuts[-1])
            self._cuts.append(min(end, self._cuts[-1] + _PIECE_ROWS))
            self._bytes.append(int(ends[self._cuts[-1] - 1]))

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __getitem__(self, index: int) -> Buffer:
        first, count = self._cuts[index], self._cuts[index + 1] - self._cuts[index]
        nbytes = self._bytes[index + 1] - self._bytes[index]
        return Buffer(self._rows, self._address + RUN_BYTES * first, count, nbytes)


class DataMessages:
    """The tag messages with the data of one transfer, which this side sends or receives."""

    def __init__(
        self,
        connection: UCXConnection,
        transfer: int,
        iovec: bytes,
        on_end: Callable[[DataMessages], None],
    ) -> None:
        """Cut the rows into pieces.

        Args:
            connection: carries the messages.
            transfer: number of the transfer, which is a part of each tag.
            iovec: the rows.
            on_end: called when UCX has completed all requests and no further request follows.

        Raises:
            ValueError: the rows need more pieces than one transfer may have.
        """
        self.transfer = transfer
        self.pieces = Pieces(iovec)
        if len(self.pieces) >= 1 << messages.PIECE_BITS:
            raise ValueError(
                f"{len(self.pieces)} pieces are too many for one transfer: split the transfer"
            )
        self.error = ""
        self.has_ended = False
        self._connection = connection
        self._on_end = on_end
        self._next_piece = 0
        self._requests: dict[int, UCXRequest] = {}

    def receive(self) -> None:
        """Post receives for all pieces."""
        while self._next_piece < len(self.pieces):
            self._post(self._connection.receive)

    def send(self) -> None:
        while (
            self._next_piece < len(self.pieces) and len(self._requests) < WINDOW and not self.error
        ):
            self._post(self._connection.send)

    def stop(self, error: str) -> None:
        """Post no more pieces, and cancel the receives that no message has matched.

        `on_end` is called when UCX has completed the remaining requests.
        """
        self.error = self.error or error
        if self.has_ended:
            return
        self._next_piece = len(self.pieces)
        for request in self._requests.values():
            self._connection.cancel(request)
        self._end()

    def _post(self, function: Callable[..., UCXRequest]) -> None:
        piece = self._next_piece
        self._next_piece += 1
        tag = messages.data_tag(self.transfer, piece)
        is_send = function == self._connection.send

        def on_end(error: str) -> None:
            del self._requests[piece]
            if error and not self.error:
                self.stop(error)
                self._connection.fail(error)
            elif is_send:
                self.send()
            self._end()

        self._requests[piece] = function(tag, self.pieces[piece], on_end)

    def _end(self) -> None:
        if not self.has_ended and not self._requests and self._next_piece == len(self.pieces):
            self.has_ended = True
            self._on_end(self)
