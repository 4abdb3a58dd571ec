"""Offload tier: maps evicted blocks of the prefix cache to slots in host memory.

Workers make the copies. The step that overwrites a block on the device stores it first. The step of
a request that needs the prefix restores it into a new device block.

Workers apply steps in order. Within a step (`executor/step.py`) they store before any other write
to the device, and restore before the tokens run. Therefore no copy waits for a step to finish. A
slot that a step writes or reads must not be given to another block in the same step.

A restored block keeps its slot, so evicting it again copies nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from baton_engine.executor.step import BlockCopy
from baton_protocol.block_hash import BlockHash


class OffloadedBlock(NamedTuple):
    """A block of a prefix that is in the offload tier and not on the device."""

    block_hash: BlockHash
    slot: int


class OffloadTier:
    """Slots in least-recently-used order. All operations are O(1) per block."""

    def __init__(self, num_slots: int) -> None:
        """Create a tier in which all slots are free.

        Args:
            num_slots: blocks of host memory on every worker.
        """
        if num_slots < 1:
            raise ValueError(f"an offload tier needs one slot at least, got {num_slots}")
        self.num_slots = num_slots
        #: Blocks stored since start.
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
        """Return the number of blocks held."""
        return len(self._slots)

    def find(self, block_hash: BlockHash) -> OffloadedBlock | None:
        slot = self._slots.get(block_hash)
        return OffloadedBlock(block_hash, slot) if slot is not None else None

    def store(self, block_hash: BlockHash, block_id: int) -> BlockHash | None:
        """Store a computed block that the step under construction will overwrite.

        Returns:
            The hash that is no longer in the tier. It is the least recently used one, or
            `block_hash` itself if the step needs the least recently used slot. None if a slot was
            free or the block is stored already.
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
        """Keep these blocks of a sequence, given in order, until `restore` and the end of the step.

        The tail counts as used less recently, because it is useless without its prefix.
        """
        for block in reversed(blocks):
            self._slots.move_to_end(block.block_hash)
            self._busy.add(block.slot)

    def restore(self, block: OffloadedBlock, block_id: int) -> None:
        """Let the step under construction copy a held block to the device block `block_id`."""
        self._restores.append(BlockCopy(block.slot, block_id))
        self.num_restored += 1

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Finish the step under construction and return its stores and restores."""
        stores, self._stores = self._stores, []
        restores, self._restores = self._restores, []
        self._busy.clear()
        return stores, restores

    def reset(self) -> None:
        """Remove all blocks. Call it between steps only."""
        assert not self._busy, "the step under construction still needs some"
        self._slots.clear()
        self._free = list(reversed(range(self.num_slots)))
