"""A worker's KV memory, divided into the slots that peers read and write.

A *slot* holds one block: slot i is the `layout.block_nbytes` bytes from
`base_address + i * layout.block_nbytes` on. If the KV is in host memory, slot i is block i itself.
Blocks in GPU memory are copied through slots in host memory.

    producer   expose(blocks) -> slots; peers read the slots until release(slots)
    consumer   accept(blocks) -> slots; transfers fill the slots; block_sums(slots) to verify them;
               commit(slots, blocks); release(slots)

The connector's thread calls all methods.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout


class SlotMemory(abc.ABC):
    """The KV memory of one worker, as slots that peers read and write."""

    #: Layout of the blocks.
    layout: KVCacheLayout
    #: Address of slot 0.
    base_address: int
    num_slots: int
    #: Type of the memory of the slots: DRAM or VRAM.
    mem_type: str = "DRAM"
    device_id: int = 0

    @abc.abstractmethod
    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        """Return slots that hold the content of these blocks, in order.

        The result is None if too few slots are free. Peers may read the slots until `release`.
        """

    @abc.abstractmethod
    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        """Return slots to receive new content for these blocks, in order.

        The result is None if too few slots are free. Transfers may fill the slots until `release`.
        """

    @abc.abstractmethod
    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        """Copy the verified `heads` of each slot into its block, and wait for the copy."""

    @abc.abstractmethod
    def release(self, slots: Sequence[int]) -> None:
        """Free slots that `expose` or `accept` returned."""

    @abc.abstractmethod
    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        """Return the word sum of `heads` in each slot: [n]. Module `checksum` has the formula.

        Args:
            slots: slots in use.
            heads: a range of heads that this worker has.
        """


class HostMemory(SlotMemory):
    """Memory that peers reach directly: slot i is block i."""

    def __init__(
        self,
        base_address: int,
        layout: KVCacheLayout,
        sum_runs: checksum.SumRuns = checksum.sum_runs,
    ) -> None:
        """Describe memory that the caller owns.

        Args:
            base_address: address of block 0. Block i begins at
                base_address + i * layout.block_nbytes.
            layout: layout of the blocks.
            sum_runs: computes word sums. The default uses numpy; a compiled function is faster.

        Raises:
            ValueError: the size of a head of a block is not a multiple of 8 bytes.
        """
        if layout.head_nbytes % checksum.WORD_BYTES:
            raise ValueError(
                f"a head of a KV block must be a multiple of {checksum.WORD_BYTES} bytes, "
                f"this layout's has {layout.head_nbytes}"
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
    """Return the memory range of `heads` in each slot of a worker's memory.

    `heads` must not be empty.

    Returns:
        [num_slots, 3] of (address, length, device id).
    """
    rows = np.empty((num_slots, 3), dtype=np.int64)
    rows[:, 0] = base_address + (heads.first - layout.first_kv_head) * layout.head_nbytes
    rows[:, 0] += np.arange(num_slots, dtype=np.int64) * layout.block_nbytes
    rows[:, 1] = heads.count * layout.head_nbytes
    rows[:, 2] = device_id
    return rows
