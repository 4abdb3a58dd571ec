"""The pool of KV blocks: reference counts, hashes of the prefix cache, the list of free blocks.

All operations are O(1) per block. A free block keeps its cached KV, and can be found by hash, until
it is allocated again. Free blocks without cached KV are allocated first, then the least recently
used cached block. The KV of a cached block then moves to the offload tier, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton_engine.kv_cache.offload import OffloadTier
from baton_protocol.block_hash import BlockHash
from baton_protocol.engine_messages import AllBlocksCleared, BlocksRemoved, KVEvent


class Block:
    """One KV block. While the block is free, `prev` and `next` link it into the free list."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        #: Set while the block is in the prefix cache.
        self.block_hash: BlockHash | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        cached = self.block_hash is not None
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={cached})"


class FreeList:
    """The free blocks as a doubly linked list. The block at the head is allocated next."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ring = Block(-1)
        self._ring.prev = self._ring.next = self._ring
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Add `block` at the tail, so that it is allocated last."""
        assert self._ring.prev is not None
        self._insert(self._ring.prev, block)

    def append_left(self, block: Block) -> None:
        """Add `block` at the head, so that it is allocated next."""
        self._insert(self._ring, block)

    def pop_left(self) -> Block:
        """Remove and return the block at the head. Raises IndexError if the list is empty."""
        head = self._ring.next
        if head is None or head is self._ring:
            raise IndexError("no free KV block")
        self.remove(head)
        return head

    def remove(self, block: Block) -> None:
        """Remove `block` from the list, at any position."""
        assert block.prev is not None, "block is not in the free list"
        assert block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._length -= 1

    def _insert(self, after: Block, block: Block) -> None:
        assert block.prev is None, "block is already in the free list"
        assert after.next is not None
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self._length += 1


class BlockPool:
    """Allocates KV blocks, counts the references to each block and finds cached blocks by hash."""

    def __init__(
        self,
        num_blocks: int,
        events: list[KVEvent] | None = None,
        offload: OffloadTier | None = None,
    ) -> None:
        """Create a pool of `num_blocks` free blocks.

        Args:
            events: list to which evictions and resets are appended. None: nothing is recorded.
            offload: tier that stores evicted blocks. An event reports an evicted block as removed
                only when the block leaves the tier.
        """
        self.num_blocks = num_blocks
        self.events = events
        self.offload = offload
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks)
        self._cached: dict[BlockHash, Block] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without a reference, including cached blocks."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that have a reference, from 0 to 1. 0 for an empty pool."""
        return 1.0 - len(self._free) / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, num_blocks: int) -> list[Block]:
        """Take free blocks and remove them from the prefix cache. Each block gets one reference.

        Raises:
            ValueError: fewer than `num_blocks` blocks are free.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} KV blocks wanted, {len(self._free)} are free")
        blocks = [self._free.pop_left() for _ in range(num_blocks)]
        self.evict(blocks)
        for block in blocks:
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block. Free blocks leave the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Remove one reference from each block of a sequence.

        A block without remaining references enters the free list. An uncached block enters at the
        head and is allocated next. A cached block enters at the tail. The blocks enter in reverse
        order. Therefore the first blocks, which requests share most often, are evicted last.

        Args:
            blocks: in the order of the sequence.
        """
        for block in reversed(blocks):
            if block.ref_count <= 0:
                raise RuntimeError(f"KV block {block.block_id} was freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.append_left(block)
                else:
                    self._free.append(block)

    def find(self, block_hash: BlockHash) -> Block | None:
        """Return the cached block with this hash, whether free or in use. None if not cached."""
        return self._cached.get(block_hash)

    def cache(self, block: Block, block_hash: BlockHash) -> bool:
        """Add a full, computed block to the prefix cache.

        A block is not added if it is cached already, or if another block has the same hash.

        Returns:
            Whether the block was added.
        """
        if block.block_hash is not None or block_hash in self._cached:
            return False
        block.block_hash = block_hash
        self._cached[block_hash] = block
        return True

    def evict(self, blocks: Iterable[Block]) -> None:
        """Remove blocks from the prefix cache, before their content changes.

        The offload tier, if there is one, stores the removed blocks. Reference counts do not
        change.
        """
        gone: list[BlockHash] = []
        for block in blocks:
            if block.block_hash is not None:
                del self._cached[block.block_hash]
                lost: BlockHash | None = block.block_hash
                if self.offload is not None:
                    lost = self.offload.store(block.block_hash, block.block_id)
                if lost is not None and lost not in self._cached:
                    gone.append(lost)
                block.block_hash = None
        if gone and self.events is not None:
            self.events.append(BlocksRemoved(gone))

    def reset(self) -> None:
        """Empty the prefix cache and the offload tier. Reference counts do not change."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self.offload is not None:
            self.offload.reset()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
