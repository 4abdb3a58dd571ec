"""Runs of memory as the kernel takes them: struct iovec, packed, the address and the bytes of each run. Pure functions.

So they travel in requests, are kept, and are handed to readv, writev and process_vm_readv. Few runs are looked at as Python's
numbers: arrays are slower until there are many, and several times as slow in a process that has just woken up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.transfer import Descriptors, Region

_RUN = struct.Struct("<qq")
RUN_BYTES = _RUN.size
FEW_RUNS = 16
MAX_TRANSFER_BYTES = 2**40


def pack(rows: Descriptors) -> bytes:
    """`rows`: [n, 2 or more]: address, length."""
    return rows[:, :2].tobytes()


def pack_run(address: int, nbytes: int) -> bytes:
    """Raises OverflowError: not an address."""
    return address.to_bytes(8, "little", signed=True) + nbytes.to_bytes(8, "little", signed=True)


def check(iovec: bytes) -> None:
    """Raises ValueError: not of whole runs, without any, or for more than one transfer may move."""
    if not iovec or len(iovec) % RUN_BYTES:
        raise ValueError(f"a request with {len(iovec)} bytes of runs of {RUN_BYTES} bytes")
    if total_bytes(iovec) > MAX_TRANSFER_BYTES:
        raise ValueError(f"a request for more than {MAX_TRANSFER_BYTES} bytes")


def lengths_of(iovec: bytes | bytearray) -> memoryview:
    return memoryview(iovec).cast("q")[1::2]


def total_bytes(iovec: bytes | bytearray) -> int:
    """Exact up to 2^53. Of lengths below 0 it says nothing: `count_outside` finds them."""
    if _are_few(iovec):
        return sum(lengths_of(iovec))
    return int(_as_array(iovec)[:, 1].sum(dtype=np.float64))


def ends_of(iovec: bytes | bytearray) -> Sequence[int]:
    """Bytes up to and with each run."""
    ends: Sequence[int] = np.cumsum(_as_array(iovec)[:, 1])  # type: ignore[assignment]
    return ends


def count_outside(iovec: bytes | bytearray, regions: Sequence[Region]) -> int:
    """How many runs do not lie whole in one of the regions. Safe for any numbers."""
    if _are_few(iovec):
        outside = 0
        for address, length in _RUN.iter_unpack(iovec):
            for region in regions:
                if length > 0 and 0 <= address - region.address <= region.length - length:
                    break
            else:
                outside += 1
        return outside
    unsigned = _as_array(iovec).view(
        np.uint64
    )  # what is negative, or before a region, becomes huge
    addresses, lengths = unsigned[:, 0], unsigned[:, 1]
    inside = np.zeros(len(unsigned), dtype=bool)
    for region in regions:
        offsets, length = addresses - np.uint64(region.address), np.uint64(region.length)
        inside |= (offsets < length) & (lengths - np.uint64(1) < length - offsets)
    return len(unsigned) - int(np.count_nonzero(inside))


def split(iovec: bytes, max_bytes: int) -> bytes:
    """The same bytes, runs longer than `max_bytes` in pieces."""
    rows = _as_array(iovec)
    lengths = rows[:, 1]
    if lengths.max() <= max_bytes:
        return iovec
    pieces = -(-lengths // max_bytes)
    row = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
    return np.stack(
        (rows[row, 0] + offset, np.minimum(lengths[row] - offset, max_bytes)), axis=1
    ).tobytes()


def _are_few(iovec: bytes | bytearray) -> bool:
    return len(iovec) <= FEW_RUNS * RUN_BYTES


def _as_array(iovec: bytes | bytearray) -> NDArray[np.int64]:
    return np.frombuffer(iovec, dtype=np.int64).reshape(-1, 2)
