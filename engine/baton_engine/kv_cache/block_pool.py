"""Block pool: reference counts, the prefix cache's hashes and the list of free blocks.

All operations are O(1) per block. A free block keeps its cached KV, and can be found by hash,
until it is handed out again. The least recently used block goes first. Its content then moves to
the offload tier, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton_engine.kv_cache.offload import OffloadTier
from baton_protocol.block_hash import BlockHash
from baton_protocol.messages import AllBlocksCleared, BlocksRemoved, KVEvent


class Block:
    """One KV block. `prev` and `next` link it into the free list while it has no holder."""

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
    """Free blocks as a doubly linked list. A sentinel closes the ring.

    The head is handed out next.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ring = Block(-1)
        self._ring.prev = self._ring.next = self._ring
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Add `block` at the tail: it is handed out last."""
        assert self._ring.prev is not None
        self._insert(self._ring.prev, block)

    def append_left(self, block: Block) -> None:
        """Add `block` at the head: it is handed out next."""
        self._insert(self._ring, block)

    def pop_left(self) -> Block:
        """Remove and return the head. Raises IndexError if the list is empty."""
        head = self._ring.next
        if head is None or head is self._ring:
            raise IndexError("no free KV block")
        self.remove(head)
        return head

    def remove(self, block: Block) -> None:
        """Remove `block` from any position."""
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
    """Allocates blocks, counts their holders and finds cached blocks by hash."""

    def __init__(
        self,
        num_blocks: int,
        events: list[KVEvent] | None = None,
        offload: OffloadTier | None = None,
    ) -> None:
        """Create blocks that are all free.

        Args:
            events: list to which evictions and resets are appended.
            offload: tier that stores evicted blocks. `events` reports them as removed when they
                leave the tier.
        """
        self.num_blocks = num_blocks
        self.events = events
        self.offload = offload
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks)
        self._cached: dict[BlockHash, Block] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder, including cached ones."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of blocks that have a holder, 0 to 1. 0 for an empty pool."""
        return 1.0 - len(self._free) / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, num_blocks: int) -> list[Block]:
        """Take free blocks and evict their cached content.

        Raises:
            ValueError: fewer blocks are free; check `num_free_blocks` first.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} KV blocks wanted, {len(self._free)} are free")
        blocks = [self._free.pop_left() for _ in range(num_blocks)]
        self.evict(blocks)
        for block in blocks:
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one holder to each of these held or cached blocks."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Remove one holder from each block of a sequence, given in the sequence's order.

        The tail enters the free list first, because a prefix is shared more often than what follows
        it.
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
        """Return the block that holds the tokens of `block_hash`, whether free or not."""
        return self._cached.get(block_hash)

    def cache(self, block: Block, block_hash: BlockHash) -> bool:
        """Add a full, computed block to the prefix cache.

        If another block with the same content is cached already, that one stays and `block` remains
        private.

        Returns:
            Whether `block_hash` is new to the cache.
        """
        if block.block_hash is not None or block_hash in self._cached:
            return False
        block.block_hash = block_hash
        self._cached[block_hash] = block
        return True

    def evict(self, blocks: Iterable[Block]) -> None:
        """Remove blocks from the prefix cache before their content changes. Holders keep them."""
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
        """Remove all content from the prefix cache and the offload tier.

        Holders keep their blocks.
        """
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self.offload is not None:
            self.offload.reset()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
