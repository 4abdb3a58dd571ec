"""KV memory that peers cannot reach where it lies: its blocks travel through slots of host memory, of which there are few.

    producer   expose: blocks -> slots, then peers read            release
    consumer   accept: slots, peers write or transfers fill them   commit: slots -> blocks   release

Where blocks lie, and how they are copied, only the engine knows: it brings both copies.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.kv_memory import HostKVMemory, KVMemory
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout

logger = logging.getLogger(__name__)

CopyOut = Callable[[Sequence[int], Sequence[int]], None]
"""(block ids, slots): each block's content is in its slot when this returns."""
CopyIn = Callable[[Sequence[int], Sequence[int], HeadRange], None]
"""(slots, block ids, heads of the model): these heads of each slot are in its block when this returns; other heads of the block
stay as they are."""


class StagedKVMemory(KVMemory):
    """A slot is handed out once until it is released."""

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
        """
        Args:
            base_address: of slot 0, in host memory; slot i begins at base_address + i * layout.block_nbytes.
            layout: of the blocks.
            sum_runs: computes checksums of what lies in slots.

        Raises:
            ValueError: there is no slot, or a head of a block is no multiple of 8 bytes.
        """
        if num_slots < 1:
            raise ValueError(
                f"blocks of {layout.block_nbytes} bytes travel through host memory that has no room for one of them: "
                "raise kv_transfer.staging_bytes"
            )
        self._staging = HostKVMemory(base_address, layout, sum_runs)
        self.layout = layout
        self.base_address = base_address
        self.num_slots = num_slots
        self._copy_out = copy_out
        self._copy_in = copy_in
        self._free = list(
            range(num_slots)
        )  # a heap: low slots first, as adjacent ones travel as one descriptor
        self._exposed: set[int] = set()
        self._accepted: dict[int, int] = {}  # slot -> the block it is for
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
            self._exposed.update(slots)
        return slots

    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        slots = self._take(len(block_ids))
        if slots:
            self._accepted.update(zip(slots, block_ids, strict=True))
        return slots

    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        """Raises: ValueError: a slot was not accepted for its block."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            if self._accepted.get(slot) != block_id:
                raise ValueError(f"slot {slot} was not accepted for block {block_id}")
        if slots:
            self._copy_in(slots, block_ids, heads)

    def release(self, slots: Sequence[int]) -> None:
        """Raises: ValueError: a slot is not in use, or named twice; none is released then."""
        self._check_used(slots)
        if len(set(slots)) != len(slots):
            raise ValueError(f"a slot is named twice: {list(slots)}")
        self._exposed.difference_update(slots)
        for slot in slots:
            self._accepted.pop(slot, None)
        self._give_back(slots)

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        """Raises: ValueError: a slot is not in use."""
        self._check_used(slots)
        return self._staging.block_sums(slots, heads)

    def _take(self, count: int) -> list[int] | None:
        """Slots that are in neither set yet. None also for more than there are: who waits has a deadline."""
        if count > self.num_slots and not self._warned:
            self._warned = True
            logger.warning(
                "%d blocks at once do not fit into %d slots of host memory, transfers of so many fail: "
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
            if slot not in self._exposed and slot not in self._accepted:
                raise ValueError(
                    f"slot {slot} is not in use: it was never handed out, or was released already"
                )
