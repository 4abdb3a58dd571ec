"""KV memory that peers cannot reach directly: blocks are copied through slots of host memory.

`expose` copies blocks into slots, and `commit` copies slots into blocks; see `slot_memory`. The
engine provides both copy functions, because only the engine knows where its blocks are.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory, SlotMemory

logger = logging.getLogger(__name__)

#: A function of (block ids, slots) that copies each block into its slot before returning.
CopyOut = Callable[[Sequence[int], Sequence[int]], None]
#: A function of (slots, block ids, heads of the model) that copies these heads of each slot into
#: its block before returning. Other heads of the block do not change.
CopyIn = Callable[[Sequence[int], Sequence[int], HeadRange], None]


class StagedMemory(SlotMemory):
    """KV memory whose blocks are copied into and out of slots. A slot holds one block at a time."""

    def __init__(
        self,
        base_address: int,
        num_slots: int,
        layout: KVCacheLayout,
        *,
        copy_out: CopyOut,
        copy_in: CopyIn,
        sum_runs: checksum.SumRuns = checksum.sum_runs,
    ) -> None:
        """Divide the caller's host memory into slots.

        Args:
            base_address: address of slot 0 in host memory. Slot i begins at
                base_address + i * layout.block_nbytes.
            num_slots: number of slots in the host memory.
            layout: layout of the blocks.
            copy_out: copies blocks into slots.
            copy_in: copies slots into blocks.
            sum_runs: computes word sums of slots.

        Raises:
            ValueError: there is no slot, or the size of a head of a block is not a multiple of 8
                bytes.
        """
        if num_slots < 1:
            raise ValueError(
                f"the staging memory has no room for one block of {layout.block_nbytes} bytes: "
                "raise kv_transfer.staging_bytes"
            )
        self._staging = HostMemory(base_address, layout, sum_runs)
        self.layout = layout
        self.base_address = base_address
        self.num_slots = num_slots
        self._copy_out = copy_out
        self._copy_in = copy_in
        #: Heap of free slots. The lowest slots are taken first: the more slots are adjacent, the
        #: fewer memory ranges a transfer has.
        self._free = list(range(num_slots))
        #: Slot in use -> the block for which `accept` returned the slot; None: from `expose`.
        self._used: dict[int, int | None] = {}
        self._warned = False

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        slots = self._take(len(block_ids))
        if slots:
            try:
                self._copy_out(block_ids, slots)
            except BaseException:
                self._give_back(slots)
                raise
            self._used.update(dict.fromkeys(slots))
        return slots

    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        slots = self._take(len(block_ids))
        if slots:
            self._used.update(zip(slots, block_ids, strict=True))
        return slots

    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        """Copy the verified heads of each slot into its block. See SlotMemory.

        Raises:
            ValueError: a slot is not the one that `accept` returned for its block.
        """
        for slot, block_id in zip(slots, block_ids, strict=True):
            if self._used.get(slot) != block_id:
                raise ValueError(f"slot {slot} was not accepted for block {block_id}")
        if slots:
            self._copy_in(slots, block_ids, heads)

    def release(self, slots: Sequence[int]) -> None:
        """Free the slots. See SlotMemory.

        Raises:
            ValueError: a slot is free already or named twice. Then no slot is freed.
        """
        self._check_used(slots)
        if len(set(slots)) != len(slots):
            raise ValueError(f"a slot is named twice: {list(slots)}")
        for slot in slots:
            del self._used[slot]
        self._give_back(slots)

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        """Return the word sum of each slot. See SlotMemory.

        Raises:
            ValueError: a slot is not in use.
        """
        self._check_used(slots)
        return self._staging.block_sums(slots, heads)

    def _take(self, count: int) -> list[int] | None:
        """Take and return `count` free slots; None if fewer slots are free.

        If the memory has fewer than `count` slots in total, no retry can succeed. The first such
        call logs a warning.
        """
        if count > self.num_slots and not self._warned:
            self._warned = True
            logger.warning(
                "a transfer needs %d slots of host memory at once, and there are %d, so it fails: "
                "raise kv_transfer.staging_bytes",
                count,
                self.num_slots,
            )
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _check_used(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot not in self._used:
                raise ValueError(
                    f"slot {slot} is not in use: it was never taken, or it was released"
                )
