"""Runs of memory as packed struct iovecs: address and length of each run. Pure functions.

Requests carry them in this form, and readv, writev and process_vm_readv take them as they are. A
few runs are handled as Python integers: arrays are slower until there are many, and several times
as slow in a process that has just woken up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.transfer import Descriptors, Region

_RUN = struct.Struct("<qq")
RUN_BYTES = _RUN.size
FEW_RUNS = 16
MAX_TRANSFER_BYTES = 2**40


def pack(rows: Descriptors) -> bytes:
    """Return the iovec of rows [n, 2 or more]: address, length."""
    return rows[:, :2].tobytes()


def pack_run(address: int, nbytes: int) -> bytes:
    """Return the iovec of one run.

    Raises:
        OverflowError: the address is invalid.
    """
    return address.to_bytes(8, "little", signed=True) + nbytes.to_bytes(8, "little", signed=True)


def check(iovec: bytes) -> None:
    """Check a request's iovec.

    Raises:
        ValueError: it has no run, a part of a run, or more bytes than one transfer may move.
    """
    if not iovec or len(iovec) % RUN_BYTES:
        raise ValueError(f"a request with {len(iovec)} bytes of runs of {RUN_BYTES} bytes")
    if total_bytes(iovec) > MAX_TRANSFER_BYTES:
        raise ValueError(f"a request for more than {MAX_TRANSFER_BYTES} bytes")


def lengths_of(iovec: bytes | bytearray) -> memoryview:
    return memoryview(iovec).cast("q")[1::2]


def total_bytes(iovec: bytes | bytearray) -> int:
    """Return the sum of the lengths, exact up to 2^53.

    Negative lengths give no useful sum: `count_outside` finds them.
    """
    if _are_few(iovec):
        return sum(lengths_of(iovec))
    return int(_as_array(iovec)[:, 1].sum(dtype=np.float64))


def ends_of(iovec: bytes | bytearray) -> Sequence[int]:
    """Return the number of bytes up to the end of each run."""
    if _are_few(iovec):
        return list(accumulate(lengths_of(iovec)))
    ends: Sequence[int] = np.cumsum(_as_array(iovec)[:, 1])  # type: ignore[assignment]
    return ends


def count_outside(iovec: bytes | bytearray, regions: Sequence[Region]) -> int:
    """Return how many runs are not inside one of the regions. Safe for any numbers."""
    if _are_few(iovec):
        outside = 0
        for address, length in _RUN.iter_unpack(iovec):
            for region in regions:
                if length > 0 and 0 <= address - region.address <= region.length - length:
                    break
            else:
                outside += 1
        return outside
    # Negative numbers and offsets become huge.
    unsigned = _as_array(iovec).view(np.uint64)
    addresses, lengths = unsigned[:, 0], unsigned[:, 1]
    inside = np.zeros(len(unsigned), dtype=bool)
    for region in regions:
        offsets, length = addresses - np.uint64(region.address), np.uint64(region.length)
        inside |= (offsets < length) & (lengths - np.uint64(1) < length - offsets)
    return len(unsigned) - int(np.count_nonzero(inside))


def split(iovec: bytes, max_bytes: int) -> bytes:
    """Return the same bytes with runs longer than `max_bytes` cut into pieces."""
    if _are_few(iovec):
        runs = []
        for address, length in _RUN.iter_unpack(iovec):
            for first in range(0, length, max_bytes):
                runs += [address + first, min(max_bytes, length - first)]
        return struct.pack(f"<{len(runs)}q", *runs)
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
