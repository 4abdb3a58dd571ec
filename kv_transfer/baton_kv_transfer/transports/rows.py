"""Rows of memory on their way through a socket: readv and writev straight into and out of them, continued wherever they stopped.

Both sides of a transfer have rows of the same lengths in the same order, so they cut them into the same frames.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME_BYTES = 2**20
"""Greatest frame: some tenths of a millisecond, then others have their turn."""
MAX_TRANSFER_BYTES = 2**40
_MAX_ROWS = 1024  # IOV_MAX


class Rows:
    """Bytes of rows in memory, moved in frames of whole rows; rows longer than a frame count as several."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        """
        Args:
            rows: [n, 2 or more]: address, length; at least one, none empty, MAX_TRANSFER_BYTES altogether at most.
        """
        self.rows = rows[:, :2]
        self._nbytes = int(rows[:, 1].sum())
        whole = self.rows if self._nbytes <= FRAME_BYTES else split(self.rows, FRAME_BYTES)
        self._iov = np.array(whole, dtype=np.int64, order="C")  # struct iovec; a copy, it is changed
        self._base = self._iov.ctypes.data
        self._next = 0  # the row that moves next
        self._moved = 0
        self._frame_end = 0  # rows and bytes up to there
        self._frame_bytes_end = 0

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Bytes up to and with each row; first asked for before any row changes."""
        return np.cumsum(self._iov[:, 1])

    @property
    def done(self) -> bool:
        return self._next == len(self._iov)

    @property
    def frame_missing(self) -> int:
        """Bytes of the frame begun."""
        return self._frame_bytes_end - self._moved

    def begin_frame(self) -> int:
        """As many rows as a frame takes; their bytes."""
        if self._nbytes - self._moved <= FRAME_BYTES:
            self._frame_end, self._frame_bytes_end = len(self._iov), self._nbytes
        else:
            self._frame_end = int(np.searchsorted(self._ends, self._moved + FRAME_BYTES, "right"))
            self._frame_bytes_end = int(self._ends[self._frame_end - 1])
        return self.frame_missing

    def take_frame(self, nbytes: int) -> None:
        """Begins a frame that the other side chose. Raises ValueError: it is not of whole rows, or not of these."""
        end = self._moved + nbytes
        if end == self._nbytes:
            self._frame_end = len(self._iov)
        else:
            last = int(np.searchsorted(self._ends, end, "left"))
            if last == len(self._ends) or self._ends[last] != end:
                raise ValueError(f"a frame of {nbytes} bytes does not fit the rows of its transfer")
            self._frame_end = last + 1
        self._frame_bytes_end = end

    def receive(self, fd: int) -> int:
        """See `_move`; 0: the other side closed."""
        return self._move(_load("readv"), fd)

    def send(self, fd: int) -> int:
        return self._move(_load("writev"), fd)

    def _move(self, function: Any, fd: int) -> int:
        """Moves what can be moved at once of the frame begun; bytes.

        Raises:
            OSError: BlockingIOError if that is nothing.
        """
        count = min(self._frame_end - self._next, _MAX_ROWS)
        moved: int = function(fd, self._base + 16 * self._next, count)
        if moved < 0:
            raise OSError(c.get_errno(), os.strerror(c.get_errno()))
        ends = self._ends if moved < self.frame_missing else None  # rows change below only
        self._moved += moved
        if ends is None:
            self._next = self._frame_end
        else:
            self._next = int(np.searchsorted(ends, self._moved, "right"))
            row = self._iov[self._next]
            left = ends[self._next] - self._moved
            row[0] += row[1] - left
            row[1] = left
        return moved


def split(rows: NDArray[np.int64], max_bytes: int) -> NDArray[np.int64]:
    """The same bytes, rows longer than `max_bytes` in pieces: [m, 2]."""
    lengths = rows[:, 1]
    if lengths.max() <= max_bytes:
        return rows
    pieces = -(-lengths // max_bytes)
    row = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
    return np.stack((rows[row, 0] + offset, np.minimum(lengths[row] - offset, max_bytes)), axis=1)


@functools.cache
def _load(name: str) -> Any:
    """readv or writev of the C library, called without the GIL. `Any`: ctypes functions have no useful type."""
    function = c.CDLL(None, use_errno=True)[name]
    function.restype = c.c_ssize_t
    function.argtypes = [c.c_int, c.c_void_p, c.c_int]
    return function
