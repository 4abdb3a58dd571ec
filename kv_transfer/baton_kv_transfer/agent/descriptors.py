"""Pure functions that check and merge lists of descriptors.

A descriptor is a range of memory: a row (address, length in bytes, device id).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.iovec import FEW_RUNS
from baton_kv_transfer.transports.transfer import MEM_TYPES, Descriptors, Region


@dataclass(frozen=True, slots=True)
class XferDescs:
    """Checked descriptors of one memory type. Each row is (address, length, device id)."""

    rows: Descriptors
    mem_type: str

    def __len__(self) -> int:
        return len(self.rows)


def check_mem_type(mem_type: str) -> None:
    if mem_type not in MEM_TYPES:
        raise ValueError(f"memory type must be {' or '.join(MEM_TYPES)}, got {mem_type!r}")


def check_regions(regions: Sequence[tuple[int, int, object, object]], owner: str) -> None:
    """Check that each region is a valid and non-empty range of addresses.

    Args:
        regions: a tuple for each region, which begins with the address and the length in bytes.
        owner: name of the agent that has the memory, for the error message.

    Raises:
        ValueError: a region is invalid or empty.
    """
    for address, length, *_ in regions:
        if not 0 <= address < address + length < 2**63:
            raise ValueError(f"agent {owner} cannot have {length} bytes of memory at {address:#x}")


def check_rows(descs: Sequence[tuple[int, int, int]] | Descriptors, mem_type: str) -> XferDescs:
    """Check rows of (address, length, device id), and return them as descriptors.

    Raises:
        ValueError: the shape is not [n, 3], there is no row, a length is below 1, or the memory
            type is unknown.
    """
    check_mem_type(mem_type)
    rows = np.ascontiguousarray(descs, dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
        raise ValueError(
            "descriptors must be [n, 3] (address, length, device id) with n >= 1, "
            f"got shape {rows.shape}"
        )
    if (rows[:, 1] < 1).any():
        raise ValueError("descriptors must have lengths of at least 1 byte")
    return XferDescs(rows, mem_type)


def check_pairs(operation: str, local: Descriptors, remote: Descriptors) -> None:
    """Check the operation, and check that local row i and remote row i have equal lengths.

    Raises:
        ValueError: the operation is not READ or WRITE, there is no row, or the lengths differ.
    """
    if operation not in ("READ", "WRITE"):
        raise ValueError(f"operation must be READ or WRITE, got {operation!r}")
    if not len(local) or local[:, 1].tobytes() != remote[:, 1].tobytes():
        raise ValueError(
            f"both sides need the same number of descriptors, at least one, of equal lengths: "
            f"got {len(local)} local, {len(remote)} remote"
        )


def select(descs: Descriptors, indices: NDArray[np.int64]) -> Descriptors:
    """Return the rows of `descs` at `indices`, in the order of `indices`: [len(indices), 3].

    Raises:
        ValueError: an index is negative or too large, or `indices` is not one-dimensional.
    """
    if indices.ndim == 1 and not _any_negative(indices):
        try:  # contextlib.suppress and descs[indices] take twice as long for few rows
            return descs.take(indices, axis=0)
        except IndexError:
            pass
    raise ValueError(f"indices must be a flat list of numbers from 0 to {len(descs) - 1}")


def locate(descs: XferDescs, regions: Sequence[Region], owner: str) -> NDArray[np.int64]:
    """Return the index of the region that contains each descriptor: [n].

    Args:
        descs: n descriptors.
        regions: registered memory of one agent.
        owner: name of that agent, for the error message.

    Raises:
        ValueError: a descriptor is in no region.
    """
    rows = descs.rows
    found = np.full(len(rows), -1, dtype=np.int64)
    for index, region in enumerate(regions):
        if region.mem_type != descs.mem_type:
            continue
        # Compare offset and remaining length. The sum of address and an untrusted length could
        # overflow.
        offset = rows[:, 0] - region.address
        inside = (offset >= 0) & (offset <= region.length) & (rows[:, 1] <= region.length - offset)
        found[inside & (rows[:, 2] == region.device_id)] = index
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        address, length, device_id = rows[row].tolist()
        raise ValueError(
            f"descriptor {row} ({length} bytes at {address:#x} of {descs.mem_type} {device_id}) "
            f"is outside the memory that {owner} registered"
        )
    return found


def run_starts(
    local: Descriptors,
    remote: Descriptors,
    local_regions: NDArray[np.int64] | None = None,
    remote_regions: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the index of the first row of each run: [runs].

    A run is a sequence of rows whose ranges are adjacent in local memory and in remote memory.
    `local_regions` and `remote_regions` are region indices from `locate`, [n]. If they are given,
    a run does not extend over several regions.
    """
    lengths = local[:, 1]
    joins = (local[1:, 0] == local[:-1, 0] + lengths[:-1]) & (
        remote[1:, 0] == remote[:-1, 0] + lengths[:-1]
    )
    joins &= (local[1:, 2] == local[:-1, 2]) & (remote[1:, 2] == remote[:-1, 2])
    for regions in (local_regions, remote_regions):
        if regions is not None:
            joins &= regions[1:] == regions[:-1]
    return np.flatnonzero(np.concatenate(([True], ~joins)))


def may_merge(local: Descriptors, remote: Descriptors) -> bool:
    """Return whether `merge` may be able to join rows.

    For up to FEW_RUNS rows, the result is False if no rows are adjacent. For more rows, it is
    always True.
    """
    if len(local) > FEW_RUNS:
        return True
    ours, theirs = local.tolist(), remote.tolist()
    return any(
        ours[row][0] + ours[row][1] == ours[row + 1][0]
        and theirs[row][0] + theirs[row][1] == theirs[row + 1][0]
        for row in range(len(ours) - 1)
    )


def merge(
    local: Descriptors,
    remote: Descriptors,
    local_regions: NDArray[np.int64],
    remote_regions: NDArray[np.int64],
) -> tuple[Descriptors, Descriptors]:
    """Merge each run of adjacent rows (see `run_starts`) into one row.

    Returns:
        The local rows and the remote rows, [runs, 3] each.
    """
    starts = run_starts(local, remote, local_regions, remote_regions)
    lengths = local[:, 1]
    local, remote = local[starts], remote[starts]
    local[:, 1] = remote[:, 1] = np.add.reduceat(lengths, starts)
    return local, remote


def _any_negative(indices: NDArray[np.int64]) -> bool:
    if len(indices) <= FEW_RUNS:
        return min(indices.tolist(), default=0) < 0
    return bool((indices < 0).any())
