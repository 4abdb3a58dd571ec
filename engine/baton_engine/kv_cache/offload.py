"""The books of the offload tier: which slot of host memory holds which block that the prefix cache evicted. Workers copy.

A block is stored by the step that overwrites it on the device, and restored, into a block of its own, by the step of a request
whose prefix needs it. Workers apply steps in order, and within a step they store before anything else writes to the device and
restore before the tokens run (`executor/step.py`): so neither waits for a step to come back. What is left to care for is one step:
a slot that it writes or reads is given to no other block before it is over.

A restored block keeps its slot: when it is evicted again, nothing is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from baton_engine.executor.step import BlockCopy
from baton_engine.protocol.block_hash import BlockHash


class OffloadedBlock(NamedTuple):
    """A block of a prefix that is in the tier, and not on the device."""

    block_hash: BlockHash
    slot: int


class OffloadTier:
    """All O(1) per block."""

    def __init__(self, num_slots: int) -> None:
        """
        Args:
            num_slots: blocks of host memory on every worker.
        """
        if num_slots < 1:
            raise ValueError(f"an offload tier needs one slot at least, got {num_slots}")
        self.num_slots = num_slots
        self.num_stored = 0
        """Blocks copied here since the start."""
        self.num_restored = 0
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        """Least recently used first."""
        self._free: list[int] = []
        self._stores: list[BlockCopy] = []
        self._restores: list[BlockCopy] = []
        self._busy: set[int] = set()
        """Slots that the step under construction writes or reads."""
        self.reset()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._slots)

    @property
    def hashes(self) -> set[BlockHash]:
        """Of all blocks held."""
        return set(self._slots)

    def find(self, block_hash: BlockHash) -> OffloadedBlock | None:
        slot = self._slots.get(block_hash)
        return OffloadedBlock(block_hash, slot) if slot is not None else None

    def store(self, block_hash: BlockHash, block_id: int) -> BlockHash | None:
        """Keeps a computed block that the step under construction will overwrite.

        Returns:
            The hash that this tier does not hold, because of it: of the block used least recently, or `block_hash` itself, if the
            step needs that one. None if there was room.
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
        """Until the step under construction is over, these blocks of a sequence, in its order, stay: `restore` follows.

        The tail counts as used less recently: without what precedes it, it is of no use.
        """
        for block in reversed(blocks):
            self._slots.move_to_end(block.block_hash)
            self._busy.add(block.slot)

    def restore(self, block: OffloadedBlock, block_id: int) -> None:
        """The step under construction copies a held block to the device's block `block_id`."""
        self._restores.append(BlockCopy(block.slot, block_id))
        self.num_restored += 1

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """The step is complete. Returns its stores and its restores."""
        stores, self._stores = self._stores, []
        restores, self._restores = self._restores, []
        self._busy.clear()
        return stores, restores

    def reset(self) -> None:
        """Forgets all blocks. Between steps only."""
        assert not self._busy, "the step under construction still needs some"
        self._slots.clear()
        self._free = list(reversed(range(self.num_slots)))
