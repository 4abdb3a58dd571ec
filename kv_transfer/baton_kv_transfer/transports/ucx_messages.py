"""Transfers as active messages, where UCX has no remote memory access of the network's own (tcp) and would emulate it.

    READ    the reader's request names rows of the owner's memory; the owner checks them and sends their bytes
    WRITE   the writer's request names rows of the owner's memory, the bytes follow; the owner checks the rows, stores, and answers

UCX's emulation is left alone because it trusts addresses that a peer names, and because UCX 1.21 ends the process that answers a
read whose reader died. Bytes travel in frames, each a piece of the stream of all the transfer's rows; who receives puts them
into memory itself, while the transfer is under way here. So what comes late finds nobody.
"""

from __future__ import annotations

import ctypes as c
import os
from bisect import bisect_right
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

FRAME_BYTES = 2**19
"""One frame; the segments of UCX's tcp transport are chosen to hold it (ucx_context)."""
MAX_FRAME_ROWS = 16
NUMBER_BYTES = 16
FRAME_HEADER_BYTES = NUMBER_BYTES + 8


class Request(msgspec.Struct, array_like=True):
    """What is asked of the owner of memory, and where its answer goes."""

    op: str
    number: bytes
    """Random: who was not told cannot answer."""
    name: str
    address: bytes
    connection: bytes
    """Random, of the asking side's connection: after a new one, the answer needs a new one, too."""
    notif: bytes
    rows: bytes
    """[n, 2] int64, little endian: address, length."""


def draw_number() -> bytes:
    return os.urandom(NUMBER_BYTES)


def pack_rows(rows: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(rows[:, :2], dtype="<i8").tobytes()


def unpack_rows(packed: bytes) -> NDArray[np.int64]:
    """[n, 2]. Raises ValueError: not rows, or none."""
    rows = np.frombuffer(packed, dtype="<i8").reshape(-1, 2)
    if len(rows) == 0:
        raise ValueError("a request without descriptors")
    return rows


class Outgoing:
    """Rows to send, frame by frame. Keeps what UCX reads from until it is dropped."""

    def __init__(self, number: bytes, rows: NDArray[np.int64]) -> None:
        """
        Args:
            rows: [n, 2 or more]: address, length.
        """
        self._number = number
        self._rows = _split(rows[:, :2])  # as UCX wants it: ucp_dt_iov_t is a pointer and a length
        self._base = self._rows.ctypes.data
        self._starts = np.cumsum(self._rows[:, 1]) - self._rows[:, 1]
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._rows)

    def next_frame(self) -> tuple[bytes, int, int]:
        """(header, address of its rows, number of rows)."""
        first = self._next
        offset = int(self._starts[first])
        last = int(np.searchsorted(self._starts, offset + FRAME_BYTES, "left"))  # the first that starts too late
        ends = int(self._starts[last - 1] + self._rows[last - 1, 1])
        self._next = min(max(last - (ends > offset + FRAME_BYTES), first + 1), first + MAX_FRAME_ROWS)
        return self._number + offset.to_bytes(8, "little"), self._base + 16 * first, self._next - first

    def stop(self) -> None:
        self._next = len(self._rows)


class Incoming:
    """Rows to fill from frames."""

    def __init__(self, rows: NDArray[np.int64], end: Callable[[str], None]) -> None:
        """
        Args:
            rows: [n, 2 or more]: address, length.
            end: called once, with the error or "".
        """
        self.rows = rows[:, :2]
        self.end = end
        self._addresses = rows[:, 0].tolist()
        self._ends = np.cumsum(rows[:, 1]).tolist()
        self.missing = self._ends[-1]

    def fill(self, offset: int, data: int, length: int) -> None:
        """Stores a frame at `data`. Raises ValueError: it is not of these rows."""
        if offset + length > self._ends[-1] or length > self.missing:
            raise ValueError(f"{length} bytes at {offset} of a transfer of {self._ends[-1]}")
        self.missing -= length
        row = bisect_right(self._ends, offset)
        while length:
            start = self._ends[row - 1] if row else 0
            count = min(length, self._ends[row] - offset)
            c.memmove(self._addresses[row] + offset - start, data, count)
            offset, data, length, row = offset + count, data + count, length - count, row + 1


def _split(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same bytes, rows longer than a frame in pieces."""
    pieces = -(-rows[:, 1] // FRAME_BYTES)
    row = np.repeat(np.arange(len(rows)), pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * FRAME_BYTES
    return np.ascontiguousarray(
        np.stack((rows[row, 0] + offset, np.minimum(rows[row, 1] - offset, FRAME_BYTES)), axis=1)
    )
