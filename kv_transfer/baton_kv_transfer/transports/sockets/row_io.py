"""Rows of memory that readv and writev move directly through a socket.

A call may stop anywhere in a row, and the next call continues there. Both sides of a transfer have
rows of the same lengths in the same order, so both cut their rows into the same frames.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from baton_kv_transfer.transports.iovec import RUN_BYTES, ends_of, split, total_bytes

#: Maximum size of a frame. A frame takes some tenths of a millisecond. Then another transfer is
#: served.
FRAME_BYTES = 2**20
_MAX_ROWS = 1024  # IOV_MAX


class Rows:
    """Rows of memory, moved in frames of whole rows. Rows longer than a frame are split."""

    def __init__(self, iovec: bytes) -> None:
        """Prepare to move the rows in order.

        Args:
            iovec: one or more rows, none of them empty. The total is at most
                iovec.MAX_TRANSFER_BYTES bytes.
        """
        self.iovec = iovec
        self._nbytes = total_bytes(iovec)
        self._rows = iovec if self._nbytes <= FRAME_BYTES else split(iovec, FRAME_BYTES)
        #: An iovec: one free entry, then the rows. After a part of a row has moved, the entry of
        #: the row describes the rest of the row. `send` puts the address of the frame's header into
        #: the entry before the next row.
        self._left = bytearray(RUN_BYTES) + self._rows
        self._numbers = memoryview(self._left).cast("q")
        self._base = c.addressof(c.c_char.from_buffer(self._left))
        self._count = len(self._rows) // RUN_BYTES
        self._next = 0  # index of the row that moves next
        self._moved = 0  # bytes that have moved
        self._frame_end = 0  # index of the row after the current frame
        self._frame_bytes_end = 0  # bytes of all rows before that row

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """Cumulative sums of the lengths of the rows, in bytes."""
        return ends_of(self._rows)

    @property
    def is_done(self) -> bool:
        return self._next == self._count

    @property
    def is_in_last_frame(self) -> bool:
        """Whether the last frame of the rows has begun."""
        return self._frame_end == self._count

    @property
    def frame_missing(self) -> int:
        """Number of bytes of the begun frame that are left to send or receive."""
        return self._frame_bytes_end - self._moved

    def begin_frame(self) -> int:
        """Begin the next frame to send, and return the size of the frame in bytes.

        The frame has as many rows as fit into FRAME_BYTES.
        """
        if self._nbytes - self._moved <= FRAME_BYTES:
            self._frame_end, self._frame_bytes_end = self._count, self._nbytes
        else:
            self._frame_end = bisect_right(self._ends, self._moved + FRAME_BYTES)
            self._frame_bytes_end = int(self._ends[self._frame_end - 1])
        return self.frame_missing

    def take_frame(self, nbytes: int) -> None:
        """Begin the next frame to receive.

        Args:
            nbytes: size of the frame, which the other side has announced.

        Raises:
            ValueError: the frame does not end at the end of a row.
        """
        end = self._moved + nbytes
        if end == self._nbytes:
            self._frame_end = self._count
        else:
            last = bisect_left(self._ends, end)
            if last == len(self._ends) or self._ends[last] != end:
                raise ValueError(f"a frame of {nbytes} bytes does not fit the rows of its transfer")
            self._frame_end = last + 1
        self._frame_bytes_end = end

    def receive(self, fd: int) -> int:
        """Receive available bytes of the current frame into the rows.

        Returns:
            The number of bytes; 0 if the peer closed the connection.

        Raises:
            OSError: the call failed; BlockingIOError if no byte is available.
        """
        moved = self._call(
            _load("readv"), fd, self._next + 1, min(self._frame_end - self._next, _MAX_ROWS)
        )
        self._advance(moved)
        return moved

    def send(self, fd: int, head: bytearray) -> tuple[int, int]:
        """Send `head`, then rows of the current frame.

        Args:
            fd: file descriptor of the socket.
            head: bytes to send first: messages and the frame's header. May be empty.

        Returns:
            The number of bytes sent of `head`, and the number of bytes sent of the rows.

        Raises:
            OSError: the call failed; BlockingIOError if the socket accepts no byte now.
        """
        count = min(self._frame_end - self._next, _MAX_ROWS - 1)
        if not head:
            moved = self._call(_load("writev"), fd, self._next + 1, count)
            self._advance(moved)
            return 0, moved
        start = 2 * self._next
        self._numbers[start], self._numbers[start + 1] = (
            c.addressof(c.c_char.from_buffer(head)),
            len(head),
        )
        moved = self._call(_load("writev"), fd, self._next, count + 1)
        of_head = min(moved, len(head))
        self._advance(moved - of_head)
        return of_head, moved - of_head

    def put(self, source: int, nbytes: int) -> None:
        """Copy bytes of the current frame into the rows, from a buffer that received the bytes.

        Args:
            source: address of the bytes in the buffer.
            nbytes: not more than `frame_missing`.
        """
        self._moved += nbytes
        while nbytes:
            address, length = 2 * self._next + 2, 2 * self._next + 3
            part = min(nbytes, self._numbers[length])
            c.memmove(self._numbers[address], source, part)
            source += part
            nbytes -= part
            self._numbers[address] += part
            self._numbers[length] -= part
            if not self._numbers[length]:
                self._next += 1

    def _call(self, function: Any, fd: int, first: int, count: int) -> int:
        moved: int = function(fd, self._base + RUN_BYTES * first, count)
        if moved < 0:
            raise OSError(c.get_errno(), os.strerror(c.get_errno()))
        return moved

    def _advance(self, moved: int) -> None:
        self._moved += moved
        if self._moved == self._frame_bytes_end:
            self._next = self._frame_end
            return
        self._next = bisect_right(self._ends, self._moved)
        address, length = 2 * self._next + 2, 2 * self._next + 3
        left = int(self._ends[self._next]) - self._moved
        self._numbers[address] += self._numbers[length] - left
        self._numbers[length] = left


@functools.cache
def _load(name: str) -> Any:
    """Return readv or writev of the C library. A call releases the GIL.

    The return type is Any, because ctypes functions have no useful type.
    """
    function = c.CDLL(None, use_errno=True)[name]
    function.restype = c.c_ssize_t
    function.argtypes = [c.c_int, c.c_void_p, c.c_int]
    return function
