"""Pure functions on runs of memory, packed as an array of struct iovec (address, length).

A run is a contiguous range of memory. Requests carry runs in this form, which readv, writev and
process_vm_readv accept.
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
#: Up to this number of runs, Python integers are faster than numpy arrays.
FEW_RUNS = 16
#: Maximum size of a transfer. Sums of lengths up to this limit are exact in float64.
MAX_TRANSFER_BYTES = 2**40


def pack(rows: Descriptors) -> bytes:
    """Return the iovec of these rows: their addresses and lengths, without device ids."""
    return rows[:, :2].tobytes()


def pack_run(address: int, nbytes: int) -> bytes:
    """Return the iovec of one run.

    Raises:
        OverflowError: the address is invalid.
    """
    return address.to_bytes(8, "little", signed=True) + nbytes.to_bytes(8, "little", signed=True)


def check_iovec(iovec: bytes) -> None:
    """Check the iovec of a request.

    Raises:
        ValueError: the iovec is empty, its last entry is incomplete, or the runs have more than
            MAX_TRANSFER_BYTES bytes in total.
    """
    if not iovec or len(iovec) % RUN_BYTES:
        raise ValueError(
            f"a request needs descriptors of {RUN_BYTES} bytes each, got {len(iovec)} bytes"
        )
    if total_bytes(iovec) > MAX_TRANSFER_BYTES:
        raise ValueError(f"a request for more than {MAX_TRANSFER_BYTES} bytes")


def lengths_of(iovec: bytes | bytearray) -> memoryview:
    return memoryview(iovec).cast("q")[1::2]


def total_bytes(iovec: bytes | bytearray) -> int:
    """Return the sum of the lengths of all runs, in bytes. Sums up to 2^53 are exact.

    The sum is meaningless if a length is negative. `count_outside` finds runs of negative length.
    """
    if _are_few(iovec):
        return sum(lengths_of(iovec))
    return int(_as_array(iovec)[:, 1].sum(dtype=np.float64))


def ends_of(iovec: bytes | bytearray) -> Sequence[int]:
    """Return for each run i the total length of the runs 0 to i, in bytes."""
    if _are_few(iovec):
        return list(accumulate(lengths_of(iovec)))
    ends: Sequence[int] = np.cumsum(_as_array(iovec)[:, 1])  # type: ignore[assignment]
    return ends


def count_outside(iovec: bytes | bytearray, regions: Sequence[Region]) -> int:
    """Return the number of runs that are not completely inside one region.

    Runs of length 0 or less count as outside.
    """
    if _are_few(iovec):
        outside = 0
        for address, length in _RUN.iter_unpack(iovec):
            for region in regions:
                if length > 0 and 0 <= address - region.address <= region.length - length:
                    break
            else:
                outside += 1
        return outside
    # As unsigned numbers, negative lengths and offsets are huge, so they fail the checks.
    unsigned = _as_array(iovec).view(np.uint64)
    addresses, lengths = unsigned[:, 0], unsigned[:, 1]
    inside = np.zeros(len(unsigned), dtype=bool)
    for region in regions:
        offsets, length = addresses - np.uint64(region.address), np.uint64(region.length)
        inside |= (offsets < length) & (lengths - np.uint64(1) < length - offsets)
    return len(unsigned) - int(np.count_nonzero(inside))


def split(iovec: bytes, max_bytes: int) -> bytes:
    """Return an iovec of the same memory in which no run is longer than `max_bytes`."""
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
