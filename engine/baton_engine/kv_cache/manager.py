"""KV cache manager: prefix lookup, allocation, copy-on-write, swapping, restoring.

A sequence's blocks are in `KVSequence.blocks` and `KVSequence.swapped_blocks`. Only this manager
changes these lists. The manager moves no KV itself: workers make the copies that it returns, in the
order that `executor/step.py` describes.

A block must be read before it is overwritten. Within one step this forbids three orders:

- swap out a block after it was made writable,
- swap in after freeing blocks that a copy of the same step reads or writes,
- swap out after swapping in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.executor.step import BlockCopy
from baton_engine.kv_cache.block_pool import Block, BlockPool
from baton_engine.kv_cache.offload import OffloadedBlock, OffloadTier
from baton_engine.kv_cache.sequence import KVSequence
from baton_protocol.block_hash import BlockHash, hash_block, root_hash
from baton_protocol.messages import BlocksStored, KVEvent

#: A block of a cached prefix, on the device or in the offload tier.
CachedBlock = Block | OffloadedBlock


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters since start."""

    #: Tokens looked up.
    queries: int = 0
    #: Tokens found.
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
        watermark_blocks: int = 0,
        enable_events: bool = False,
    ) -> None:
        """Create pools in which all blocks are free.

        Args:
            block_size: tokens per block.
            model_key: the engine's compatibility hash. Block hashes can be compared only under the
                same key.
            num_swap_blocks: blocks in host memory for swapped requests.
            num_offload_blocks: slots in host memory for evicted blocks of the prefix cache. 0
                disables the offload tier.
            watermark_blocks: blocks that the scheduler keeps free when it admits a request. The
                manager only stores it.
            enable_events: record changes of the prefix cache for `take_events`.
        """
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self._events: list[KVEvent] | None = [] if enable_events else None
        self.offload = OffloadTier(num_offload_blocks) if num_offload_blocks else None
        self.pool = BlockPool(num_blocks, self._events, self.offload)
        self.swap_pool = BlockPool(num_swap_blocks)
        self.stats = PrefixCacheStats()
        self._model_key = model_key
        #: May change at any time. Blocks cached before are found again once it is True.
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def usage(self) -> float:
        """Fraction of blocks that have a holder, 0 to 1."""
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder, including cached ones."""
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_hashes(self, request: KVSequence) -> list[BlockHash]:
        """Return the chained hashes of the request's full blocks. Compute the missing ones."""
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._root(request)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hash_block(parent, request.token_ids[start : start + size])
            hashes.append(parent)
        return hashes

    def block_hashes_until(self, request: KVSequence, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the blocks that hold the first `num_tokens` tokens.

        A partial last block has a hash of its tokens so far.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        hashes = self.block_hashes(request)[:num_full]
        if rest:
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(
                hash_block(parent, request.token_ids[num_full * self.block_size : num_tokens])
            )
        return hashes

    def find_cached_prefix(self, request: KVSequence, max_tokens: int) -> list[CachedBlock]:
        """Return the cached blocks that hold the request's first tokens, at most `max_tokens`.

        The blocks stay where they are until `allocate` takes them.
        """
        blocks: list[CachedBlock] = []
        if self.enable_prefix_caching:
            for block_hash in self.block_hashes(request)[: max_tokens // self.block_size]:
                block: CachedBlock | None = self.pool.find(block_hash)
                if block is None and self.offload is not None:
                    block = self.offload.find(block_hash)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def allocate(
        self,
        request: KVSequence,
        num_tokens: int,
        cached: Sequence[CachedBlock] = (),
        *,
        keep_free: int = 0,
    ) -> list[int] | None:
        """Extend the request's blocks to hold its first `num_tokens` tokens, `cached` blocks first.

        Args:
            cached: result of `find_cached_prefix`, for a request without blocks. An offloaded block
                gets a device block, which enters the prefix cache at once. The step under
                construction restores it before its tokens run.
            keep_free: blocks that must stay free if any are taken.

        Returns:
            Ids of the added blocks, including cached ones. None, with nothing changed, if too few
            are free.
        """
        num_new = max(0, self.num_blocks_for(num_tokens) - len(request.blocks) - len(cached))
        on_device = [block for block in cached if isinstance(block, Block)]
        num_revived = sum(block.ref_count == 0 for block in on_device)
        num_restored = len(cached) - len(on_device)
        if not self._can_take(num_new + num_revived + num_restored, keep_free):
            return None
        self.pool.touch(on_device)
        added = self._restore(cached) if num_restored else on_device
        added += self.pool.allocate(num_new)
        request.blocks.extend(added)
        if cached:
            request.num_cached_blocks = len(cached)
        return [block.block_id for block in added]

    def fork(self, parent: KVSequence, child: KVSequence, num_tokens: int) -> None:
        """Let `child` share the parent's blocks of the first `num_tokens` tokens, which both have.

        A partial last block is shared too. It may also hold later tokens of the parent: a request
        does not read positions that it has not computed. Before either of them writes to the block,
        `make_writable` copies it for the writer. The last holder of a block writes in place.

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

    def make_writable(self, request: KVSequence, start: int, end: int) -> list[BlockCopy] | None:
        """Copy on write: make `request` the only holder of the blocks of positions [start, end).

        A block with other holders is replaced in `request.blocks` by a copy, and the others keep
        the old one. A block without other holders stays. It is removed from the prefix cache if it
        is there: a forked child may be the last holder of a block that its parent filled.

        Returns:
            Copies to make before the step's tokens run. None, with nothing changed, if too few
            blocks are free.

        Raises:
            ValueError: the request has no blocks for these positions; call `allocate` first.
        """
        if start >= end:
            return []
        first, last = start // self.block_size, self.num_blocks_for(end)
        if last > len(request.blocks):
            raise ValueError(
                f"{request.request_id} has {len(request.blocks)} KV blocks; "
                f"positions to {end} need {last}"
            )
        shared = [index for index in range(first, last) if request.blocks[index].ref_count > 1]
        if not self._can_take(len(shared)):
            return None
        copies: list[BlockCopy] = []
        for index, block in zip(shared, self.pool.allocate(len(shared)), strict=True):
            copies.append(BlockCopy(request.blocks[index].block_id, block.block_id))
            self.pool.free([request.blocks[index]])
            request.blocks[index] = block
        self.pool.evict(request.blocks[first:last])
        return copies

    def swap_out(self, requests: Sequence[KVSequence]) -> list[BlockCopy] | None:
        """Move all blocks of these requests to host memory. A block that they share is moved once.

        Their device blocks are freed as by `free`: full cached ones stay in the prefix cache until
        they are handed out again. Other holders keep their blocks.

        Returns:
            Copies from device blocks to host blocks. None, with nothing changed, if too few host
            blocks are free.

        Raises:
            ValueError: one of the requests is swapped out already.
        """
        for request in requests:
            if request.swapped_blocks:
                raise ValueError(f"{request.request_id} is swapped out already")
        num_blocks = len({block.block_id for request in requests for block in request.blocks})
        if num_blocks > self.swap_pool.num_free_blocks:
            return None
        moved, copies = _take_counterparts([request.blocks for request in requests], self.swap_pool)
        for request, host_blocks in zip(requests, moved, strict=True):
            self._free_device_blocks(request)
            request.swapped_blocks = host_blocks
        return copies

    def swap_in(
        self, requests: Sequence[KVSequence], *, keep_free: int = 0
    ) -> list[BlockCopy] | None:
        """Move all blocks of these requests to the device. A block that they share is moved once.

        The new blocks enter the prefix cache with the next `cache_blocks`. Other holders keep their
        host blocks.

        Returns:
            Copies from host blocks to device blocks. None, with nothing changed, if too few device
            blocks are free beyond `keep_free`.

        Raises:
            ValueError: one of the requests has blocks on the device.
        """
        for request in requests:
            if request.blocks:
                raise ValueError(
                    f"{request.request_id} has KV blocks on the device; it cannot be swapped in"
                )
        num_blocks = len(
            {block.block_id for request in requests for block in request.swapped_blocks}
        )
        if not self._can_take(num_blocks, keep_free):
            return None
        moved, copies = _take_counterparts(
            [request.swapped_blocks for request in requests], self.pool
        )
        for request, blocks in zip(requests, moved, strict=True):
            self._free_host_blocks(request)
            request.blocks = blocks
        return copies

    def count_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count the prefix-cache lookup of an admitted request."""
        if self.enable_prefix_caching:
            self.stats.queries += num_tokens
            self.stats.hits += num_hits

    def cache_blocks(self, request: KVSequence, num_computed_tokens: int) -> None:
        """Add the full blocks of computed, or loaded and verified, tokens to the prefix cache."""
        if not self.enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        if num_full <= request.num_cached_blocks:
            return
        hashes = self.block_hashes(request)
        first_new: int | None = None
        for index in range(request.num_cached_blocks, num_full):
            if self.pool.cache(request.blocks[index], hashes[index]) and first_new is None:
                first_new = index
        request.num_cached_blocks = num_full
        if self._events is not None and first_new is not None:
            # One event carries the whole chain, so hashes behind the first new one may be repeated.
            parent = hashes[first_new - 1] if first_new else self._root(request)
            self._events.append(BlocksStored(hashes[first_new:num_full], parent, self.block_size))

    def free(self, request: KVSequence) -> None:
        """Free all blocks of a request, on the device and on the host. Idempotent."""
        self._free_device_blocks(request)
        self._free_host_blocks(request)

    def take_offload_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return what the finished step stores in the offload tier, and what it restores."""
        return self.offload.take_copies() if self.offload is not None else ([], [])

    def reset_prefix_cache(self) -> None:
        """Remove all content from the prefix cache. Holders keep their blocks."""
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
        """Return the blocks of a prefix, with a device block for each offloaded one.

        The caller has called `pool.touch` for the blocks that are on the device.
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
        """Return whether `num_blocks` are free besides `keep_free`.

        Taking no block is always possible.
        """
        return num_blocks == 0 or num_blocks + keep_free <= self.pool.num_free_blocks

    def _free_device_blocks(self, request: KVSequence) -> None:
        blocks, request.blocks = request.blocks, []
        request.num_cached_blocks = 0
        self.pool.free(blocks)

    def _free_host_blocks(self, request: KVSequence) -> None:
        blocks, request.swapped_blocks = request.swapped_blocks, []
        self.swap_pool.free(blocks)

    def _root(self, request: KVSequence) -> BlockHash:
        return root_hash(self._model_key, request.cache_salt)


def _take_counterparts(
    tables: Sequence[Sequence[Block]], target: BlockPool
) -> tuple[list[list[Block]], list[BlockCopy]]:
    """Allocate a block of `target`, with as many holders, for each distinct block in `tables`.

    Returns:
        The tables with the new blocks, and one copy per distinct block, from old to new.
    """
    distinct = list(dict.fromkeys(block for table in tables for block in table))
    counterpart = dict(zip(distinct, target.allocate(len(distinct)), strict=True))
    taken: set[Block] = set()
    moved: list[list[Block]] = []
    for table in tables:
        new_table = [counterpart[block] for block in table]
        # `allocate` counted the first holder.
        target.touch(block for block in new_table if block in taken)
        taken.update(new_table)
        moved.append(new_table)
    return moved, [BlockCopy(old.block_id, new.block_id) for old, new in counterpart.items()]
