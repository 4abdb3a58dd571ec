"""The KV memory of a worker as its connector sees it: where blocks lie for peers, and how they get there.

PeerRegistry reach *slots*: runs of `layout.block_nbytes` bytes from `base_address` on. In host memory, and in GPU memory that the
transport reaches directly, a block's slot is the block itself. Otherwise slots are host memory through which blocks travel.

    producer   expose(blocks) -> slots, published and read (or written from) until release(slots)
    consumer   accept(blocks) -> slots, filled by transfers and proved by `block_sums`; commit(slots, blocks); release(slots)

All methods are called by the connector's thread.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout


class KVMemory(abc.ABC):
    layout: KVCacheLayout
    """Of the blocks."""
    base_address: int
    """Of slot 0."""
    num_slots: int
    mem_type: str = "DRAM"
    """Of the slots: DRAM or VRAM."""
    device_id: int = 0

    @abc.abstractmethod
    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        """Slots that hold what the blocks hold now; None: too few slots are free at present."""

    @abc.abstractmethod
    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        """Slots into which the blocks' new content may be written; None: too few slots are free at present."""

    @abc.abstractmethod
    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        """What arrived and was proved of `heads` in the slots of `accept` is in the blocks when this returns."""

    @abc.abstractmethod
    def release(self, slots: Sequence[int]) -> None:
        """The slots of `expose` or `accept` are not used any more."""

    @abc.abstractmethod
    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        """Word sums of these heads (of the model; all are this worker's) in each slot: [n]. See `checksum`."""


class HostKVMemory(KVMemory):
    """KV memory that peers reach as it lies there."""

    def __init__(
        self,
        base_address: int,
        layout: KVCacheLayout,
        sum_runs: checksum.SumRuns = checksum.sum_runs,
    ) -> None:
        """
        Args:
            base_address: of block 0; block i begins at base_address + i * layout.block_nbytes.
            sum_runs: computes checksums; the default is numpy's, a compiled one is faster.

        Raises:
            ValueError: a head of a block is no multiple of 8 bytes.
        """
        if layout.head_nbytes % checksum.WORD_BYTES:
            raise ValueError(
                f"a head of a KV block must be a multiple of {checksum.WORD_BYTES} bytes, this layout's has {layout.head_nbytes}"
            )
        self.layout = layout
        self.base_address = base_address
        self.num_slots = layout.num_blocks
        self._sum_runs = sum_runs

    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        return list(block_ids)

    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        return list(block_ids)

    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        pass

    def release(self, slots: Sequence[int]) -> None:
        pass

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        layout = self.layout
        offset = (heads.first - layout.first_kv_head) * layout.head_nbytes
        addresses = (
            self.base_address + np.asarray(slots, dtype=np.int64) * layout.block_nbytes + offset
        )
        return self._sum_runs(addresses, heads.count * layout.head_nbytes)


def slot_rows(
    base_address: int, num_slots: int, layout: KVCacheLayout, heads: HeadRange, *, device_id: int
) -> NDArray[np.int64]:
    """Descriptors of these heads of the model in each slot of a worker's memory: [num_slots, 3]; [0, 3] if there are no heads."""
    if heads.count == 0:
        return np.zeros((0, 3), dtype=np.int64)
    rows = np.empty((num_slots, 3), dtype=np.int64)
    rows[:, 0] = base_address + (heads.first - layout.first_kv_head) * layout.head_nbytes
    rows[:, 0] += np.arange(num_slots, dtype=np.int64) * layout.block_nbytes
    rows[:, 1] = heads.count * layout.head_nbytes
    rows[:, 2] = device_id
    return rows
