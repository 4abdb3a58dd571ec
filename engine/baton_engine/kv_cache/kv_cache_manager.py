"""The KV cache manager: prefix lookup, allocation, copy-on-write, swapping, restoring.

A sequence's blocks are in `KVSequence.blocks` and `KVSequence.swapped_blocks`. Only the manager
changes these lists. The manager does not move KV, but returns `BlockCopy` tuples. Workers make
these copies in the order that `executor/step.py` describes.

Workers must read a block before they overwrite it. Therefore callers must not do the following
within one step:

- swap out a block after `make_writable` has returned a copy to it,
- free blocks that a copy of the step reads or writes, and then swap in: the swap could write to
  these blocks,
- swap out after swapping in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.executor.step import BlockCopy
from baton_engine.kv_cache.block_pool import Block, BlockPool
from baton_engine.kv_cache.kv_sequence import KVSequence
from baton_engine.kv_cache.offload import OffloadedBlock, OffloadTier
from baton_protocol.block_hash import BlockHash, hash_block, root_hash
from baton_protocol.engine_messages import BlocksStored, KVEvent

#: A block of a cached prefix, on the device or in the offload tier.
CachedBlock = Block | OffloadedBlock


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters of the prefix cache since the engine's start."""

    #: Number of tokens looked up.
    queries: int = 0
    #: Number of tokens found.
    hits: int = 0


class KVCacheManager:
    """Owns the blocks of all sequences and the prefix cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model_key: str,
        *,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        num_offload_blocks: int = 0,
        enable_events: bool = False,
    ) -> None:
        """Create a manager in which all blocks are free.

        Args:
            block_size: tokens per block.
            model_key: the engine's compatibility hash. Engines with different keys compute
                different block hashes for the same tokens.
            num_swap_blocks: blocks in host memory for swapped sequences.
            num_offload_blocks: slots in host memory for evicted blocks of the prefix cache. 0
                disables the offload tier.
            enable_events: record changes of the prefix cache for `take_events`.
        """
        self.block_size = block_size
        self._events: list[KVEvent] | None = [] if enable_events else None
        self.offload = OffloadTier(num_offload_blocks) if num_offload_blocks else None
        self.pool = BlockPool(num_blocks, self._events, self.offload)
        self.swap_pool = BlockPool(num_swap_blocks)
        self.stats = PrefixCacheStats()
        self._model_key = model_key
        #: May change at any time. False keeps cached blocks, which are found again after a change
        #: to True.
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def usage(self) -> float:
        """Fraction of the device blocks that have a reference, from 0 to 1."""
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Number of device blocks without a reference, including cached blocks."""
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_hashes(self, sequence: KVSequence) -> list[BlockHash]:
        """Return the chained hashes of the sequence's full blocks. Computes missing hashes."""
        hashes, size = sequence.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._root(sequence)
        for start in range(len(hashes) * size, len(sequence.token_ids) - size + 1, size):
            parent = hash_block(parent, sequence.token_ids[start : start + size])
            hashes.append(parent)
        return hashes

    def block_hashes_until(self, sequence: KVSequence, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the blocks that hold the first `num_tokens` tokens.

        The hash of a partial last block covers the tokens up to `num_tokens`.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        hashes = self.block_hashes(sequence)[:num_full]
        if rest:
            parent = hashes[-1] if hashes else self._root(sequence)
            hashes.append(
                hash_block(parent, sequence.token_ids[num_full * self.block_size : num_tokens])
            )
        return hashes

    def find_cached_prefix(self, sequence: KVSequence, max_tokens: int) -> list[CachedBlock]:
        """Return the cached blocks that hold the sequence's first tokens, at most `max_tokens`.

        The lookup does not reserve the blocks. Pass them to `allocate`.
        """
        blocks: list[CachedBlock] = []
        if self.enable_prefix_caching:
            for block_hash in self.block_hashes(sequence)[: max_tokens // self.block_size]:
                block: CachedBlock | None = self.pool.find(block_hash)
                if block is None and self.offload is not None:
                    block = self.offload.find(block_hash)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def can_allocate(
        self,
        sequence: KVSequence,
        num_tokens: int,
        cached: Sequence[CachedBlock] = (),
        *,
        keep_free: int = 0,
    ) -> bool:
        """Return whether `allocate` with these arguments would find enough free blocks.

        Args:
            sequence: the sequence that needs the blocks.
            num_tokens: number of leading tokens that need blocks.
            cached: see `allocate`.
            keep_free: number of blocks that must stay free afterwards. Ignored if no free block is
                needed.
        """
        num_new = max(0, self.num_blocks_for(num_tokens) - len(sequence.blocks) - len(cached))
        num_revived_or_restored = sum(
            not isinstance(block, Block) or block.ref_count == 0 for block in cached
        )
        return self._can_take(num_new + num_revived_or_restored, keep_free)

    def allocate(
        self, sequence: KVSequence, num_tokens: int, cached: Sequence[CachedBlock] = ()
    ) -> bool:
        """Give the sequence enough blocks for its first `num_tokens` tokens.

        Args:
            cached: result of `find_cached_prefix`, for a sequence without blocks. These blocks
                become the sequence's first blocks. An offloaded block gets a device block, which
                this call adds to the prefix cache. The step that is being scheduled restores the
                block's KV before the step's tokens run.

        Returns:
            True on success. False, with nothing changed, if too few blocks are free.
        """
        if not self.can_allocate(sequence, num_tokens, cached):
            return False
        num_new = max(0, self.num_blocks_for(num_tokens) - len(sequence.blocks) - len(cached))
        on_device = [block for block in cached if isinstance(block, Block)]
        self.pool.touch(on_device)
        sequence.blocks += self._restore(cached) if len(on_device) < len(cached) else on_device
        sequence.blocks += self.pool.allocate(num_new)
        if cached:
            sequence.num_cached_blocks = len(cached)
        return True

    def fork(self, parent: KVSequence, child: KVSequence, num_tokens: int) -> None:
        """Share the parent's blocks of the first `num_tokens` tokens with `child`.

        These tokens must be equal in both sequences. A partial last block is shared too. That block
        may also hold later tokens of the parent, which the child does not read. Before a sequence
        writes to a shared block, `make_writable` must replace the block by a copy.

        Raises:
            ValueError: the parent's blocks hold fewer tokens, or the child has blocks already.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        if child.blocks or child.swapped_blocks:
            raise ValueError(
                f"{child.request_id} has KV blocks; "
                f"free it before it is forked from {parent.request_id}"
            )
        if num_blocks > len(parent.blocks):
            raise ValueError(
                f"{child.request_id} cannot share {num_tokens} tokens of {parent.request_id}, "
                f"which holds {len(parent.blocks)} KV blocks of {self.block_size} tokens"
            )
        num_full = num_tokens // self.block_size
        child.blocks = parent.blocks[:num_blocks]
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_cached_blocks = min(parent.num_cached_blocks, num_full)
        self.pool.touch(child.blocks)

    def make_writable(self, sequence: KVSequence, start: int, end: int) -> list[BlockCopy] | None:
        """Make `sequence` the only user of its blocks for positions [start, end) (copy on write).

        A block that other sequences use is replaced by a new block in `sequence.blocks`. A block
        that only `sequence` uses stays, but is removed from the prefix cache.

        Returns:
            Copies to make before the step's tokens run. None, with nothing changed, if too few
            blocks are free.

        Raises:
            ValueError: the sequence has no blocks for these positions. Call `allocate` first.
        """
        if start >= end:
            return []
        first, last = start // self.block_size, self.num_blocks_for(end)
        if last > len(sequence.blocks):
            raise ValueError(
                f"{sequence.request_id} has {len(sequence.blocks)} KV blocks; "
                f"positions to {end} need {last}"
            )
        shared = [index for index in range(first, last) if sequence.blocks[index].ref_count > 1]
        if not self._can_take(len(shared)):
            return None
        copies: list[BlockCopy] = []
        for index, block in zip(shared, self.pool.allocate(len(shared)), strict=True):
            copies.append(BlockCopy(sequence.blocks[index].block_id, block.block_id))
            self.pool.free([sequence.blocks[index]])
            sequence.blocks[index] = block
        self.pool.evict(sequence.blocks[first:last])
        return copies

    def can_swap_out(self, sequences: Sequence[KVSequence]) -> bool:
        """Return whether enough host blocks are free for all blocks of the sequences."""
        num_blocks = len({block.block_id for sequence in sequences for block in sequence.blocks})
        return num_blocks <= self.swap_pool.num_free_blocks

    def swap_out(self, sequences: Sequence[KVSequence]) -> list[BlockCopy] | None:
        """Move all blocks of the sequences to host memory. A shared block is moved once.

        The sequences release their device blocks. Cached blocks stay in the prefix cache until they
        are allocated again.

        Returns:
            Copies from device blocks to host blocks. None, with nothing changed, if too few host
            blocks are free.

        Raises:
            ValueError: one of the sequences is swapped out already.
        """
        for sequence in sequences:
            if sequence.swapped_blocks:
                raise ValueError(f"{sequence.request_id} is swapped out already")
        if not self.can_swap_out(sequences):
            return None
        moved, copies = _take_counterparts(
            [sequence.blocks for sequence in sequences], self.swap_pool
        )
        for sequence, host_blocks in zip(sequences, moved, strict=True):
            self._free_device_blocks(sequence)
            sequence.swapped_blocks = host_blocks
        return copies

    def can_swap_in(self, sequences: Sequence[KVSequence], *, keep_free: int = 0) -> bool:
        """Return whether the sequences fit on the device while `keep_free` blocks stay free."""
        num_blocks = len(
            {block.block_id for sequence in sequences for block in sequence.swapped_blocks}
        )
        return self._can_take(num_blocks, keep_free)

    def swap_in(self, sequences: Sequence[KVSequence]) -> list[BlockCopy] | None:
        """Move all blocks of the sequences to the device. A shared block is moved once.

        The sequences release their host blocks. The device blocks enter the prefix cache at the
        next call of `cache_blocks`.

        Returns:
            Copies from host blocks to device blocks. None, with nothing changed, if too few device
            blocks are free.

        Raises:
            ValueError: one of the sequences has blocks on the device.
        """
        for sequence in sequences:
            if sequence.blocks:
                raise ValueError(
                    f"{sequence.request_id} has KV blocks on the device; it cannot be swapped in"
                )
        if not self.can_swap_in(sequences):
            return None
        moved, copies = _take_counterparts(
            [sequence.swapped_blocks for sequence in sequences], self.pool
        )
        for sequence, blocks in zip(sequences, moved, strict=True):
            self._free_host_blocks(sequence)
            sequence.blocks = blocks
        return copies

    def count_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count the prefix-cache lookup of an admitted request in `stats`.

        Args:
            num_tokens: tokens looked up.
            num_hits: tokens found.
        """
        if self.enable_prefix_caching:
            self.stats.queries += num_tokens
            self.stats.hits += num_hits

    def cache_blocks(self, sequence: KVSequence, num_computed_tokens: int) -> None:
        """Add the full blocks of the first `num_computed_tokens` tokens to the prefix cache.

        The KV of these tokens must be computed already, or loaded and verified.
        """
        if not self.enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        if num_full <= sequence.num_cached_blocks:
            return
        hashes = self.block_hashes(sequence)
        first_new: int | None = None
        for index in range(sequence.num_cached_blocks, num_full):
            if self.pool.cache(sequence.blocks[index], hashes[index]) and first_new is None:
                first_new = index
        sequence.num_cached_blocks = num_full
        if self._events is not None and first_new is not None:
            # One event carries the whole chain, so it may repeat hashes after the first new one.
            parent = hashes[first_new - 1] if first_new else self._root(sequence)
            self._events.append(BlocksStored(hashes[first_new:num_full], parent, self.block_size))

    def free(self, sequence: KVSequence) -> None:
        """Free all blocks of a sequence, on the device and on the host. Idempotent."""
        self._free_device_blocks(sequence)
        self._free_host_blocks(sequence)

    def take_offload_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Remove and return the offload tier's copies for the step that is being scheduled.

        Call this once per step. Afterwards, the slots of this step's copies may be reused in later
        steps.

        Returns:
            Copies from device blocks to slots, and copies from slots to device blocks.
        """
        return self.offload.take_copies() if self.offload is not None else ([], [])

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache and the offload tier. Sequences keep their blocks."""
        self.pool.reset()

    def take_events(self) -> list[KVEvent]:
        """Return the changes of the prefix cache since the last call, in order.

        Empty unless `enable_events` is set.
        """
        if not self._events:
            return []
        taken = list(self._events)
        self._events.clear()  # the pool appends to the same list
        return taken

    def _restore(self, cached: Sequence[CachedBlock]) -> list[Block]:
        """Replace each offloaded block of a cached prefix by a new device block.

        Call `pool.touch` first for the blocks that are already on the device.

        Returns:
            The device blocks of the prefix.
        """
        assert self.offload is not None
        offloaded = [block for block in cached if isinstance(block, OffloadedBlock)]
        self.offload.hold(offloaded)  # else `allocate` could evict other blocks into their slots
        restored = self.pool.allocate(len(offloaded))
        for source, block in zip(offloaded, restored, strict=True):
            self.offload.restore(source, block.block_id)
            self.pool.cache(block, source.block_hash)
        targets = iter(restored)
        return [block if isinstance(block, Block) else next(targets) for block in cached]

    def _can_take(self, num_blocks: int, keep_free: int = 0) -> bool:
        """Return whether `num_blocks` can be taken while `keep_free` blocks stay free.

        Always true if `num_blocks` is 0.
        """
        return num_blocks == 0 or num_blocks + keep_free <= self.pool.num_free_blocks

    def _free_device_blocks(self, sequence: KVSequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_cached_blocks = 0
        self.pool.free(blocks)

    def _free_host_blocks(self, sequence: KVSequence) -> None:
        blocks, sequence.swapped_blocks = sequence.swapped_blocks, []
        self.swap_pool.free(blocks)

    def _root(self, sequence: KVSequence) -> BlockHash:
        return root_hash(self._model_key, sequence.cache_salt)


def _take_counterparts(
    tables: Sequence[Sequence[Block]], target: BlockPool
) -> tuple[list[list[Block]], list[BlockCopy]]:
    """Allocate in pool `target` a replacement for each distinct block in `tables`.

    A replacement gets one reference per table that contains the original block.

    Returns:
        New tables, which contain the replacements, and one copy per distinct block, from the
        original to its replacement.
    """
    distinct = list(dict.fromkeys(block for table in tables for block in table))
    counterpart = dict(zip(distinct, target.allocate(len(distinct)), strict=True))
    taken: set[Block] = set()
    moved: list[list[Block]] = []
    for table in tables:
        new_table = [counterpart[block] for block in table]
        # `allocate` counted the first reference.
        target.touch(block for block in new_table if block in taken)
        taken.update(new_table)
        moved.append(new_table)
    return moved, [BlockCopy(old.block_id, new.block_id) for old, new in counterpart.items()]
