"""The offload tier: keeps evicted blocks of the prefix cache in slots of host memory.

This module only assigns slots. Workers make the copies. The step that overwrites an evicted block
on the device first stores the block in a slot. The step of a request that needs the block copies
the slot to a new device block.

Workers apply steps in order. Within a step (`executor/step.py`), stores come before any other write
to the device, and restores come before the tokens run. Therefore no copy waits for a step to
finish. A slot that a step writes or reads must not be given to another block in the same step.

A restored block keeps its slot, so no copy is needed when the block is evicted again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from baton_engine.executor.step import BlockCopy
from baton_protocol.block_hash import BlockHash


class OffloadedBlock(NamedTuple):
    """A cached block that is in the offload tier (host memory) and not on the device."""

    block_hash: BlockHash
    slot: int


class OffloadTier:
    """Assigns slots of host memory to evicted blocks. O(1) per block.

    If no slot is free, the least recently used slot is reused.
    """

    def __init__(self, num_slots: int) -> None:
        """Create a tier in which all slots are free.

        Args:
            num_slots: number of slots on every worker. A slot holds one block.
        """
        if num_slots < 1:
            raise ValueError(f"an offload tier needs one slot at least, got {num_slots}")
        self.num_slots = num_slots
        #: Number of blocks stored in the tier, and restored from it, since the engine's start.
        self.num_stored = 0
        self.num_restored = 0
        #: Slot by hash, least recently used first.
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free: list[int] = []
        self._stores: list[BlockCopy] = []
        self._restores: list[BlockCopy] = []
        #: Slots that the step under construction writes or reads.
        self._busy: set[int] = set()
        self.reset()

    def __len__(self) -> int:
        """Return the number of blocks in the tier."""
        return len(self._slots)

    def find(self, block_hash: BlockHash) -> OffloadedBlock | None:
        """Return the block with this hash, or None if the tier does not have the block."""
        slot = self._slots.get(block_hash)
        return OffloadedBlock(block_hash, slot) if slot is not None else None

    def store(self, block_hash: BlockHash, block_id: int) -> BlockHash | None:
        """Store a computed block before the step that is being scheduled overwrites it.

        If no slot is free, the block replaces the least recently used block. If the step already
        reads or writes the slot of that block, the new block is not stored.

        Returns:
            The hash of the block that is lost: that of the replaced block, or `block_hash` if the
            new block is not stored. None if no block is lost.
        """
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        lost: BlockHash | None = None
        if self._free:
            slot = self._free.pop()
        else:
            lost, slot = next(iter(self._slots.items()))
            if slot in self._busy:
                return block_hash
            del self._slots[lost]
        self._slots[block_hash] = slot
        self._busy.add(slot)
        self._stores.append(BlockCopy(block_id, slot))
        self.num_stored += 1
        return lost

    def hold(self, blocks: Sequence[OffloadedBlock]) -> None:
        """Mark blocks as recently used, and reserve their slots until `take_copies` is called.

        Args:
            blocks: in the order of the sequence. Later blocks count as less recently used, because
                they are useless without the earlier blocks.
        """
        for block in reversed(blocks):
            self._slots.move_to_end(block.block_hash)
            self._busy.add(block.slot)

    def restore(self, block: OffloadedBlock, block_id: int) -> None:
        """Add a copy of `block` to device block `block_id` to the step that is being scheduled.

        Call `hold` for the block first.
        """
        self._restores.append(BlockCopy(block.slot, block_id))
        self.num_restored += 1

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Remove and return the copies of the step that is being scheduled.

        Afterwards, the slots of this step's copies may be reused in later steps.

        Returns:
            Copies from device blocks to slots, and copies from slots to device blocks.
        """
        stores, self._stores = self._stores, []
        restores, self._restores = self._restores, []
        self._busy.clear()
        return stores, restores

    def reset(self) -> None:
        """Remove all blocks from the tier. Call this only between steps."""
        assert not self._busy, "the step under construction still uses slots"
        self._slots.clear()
        self._free = list(reversed(range(self.num_slots)))
