"""Gives requests their KV blocks: prefix-cache lookup, allocation, caching of completed blocks, copy-on-write, swapping, restoring
evicted blocks from the offload tier.

A request's blocks are on the request (`KVSequence.blocks`, `KVSequence.swapped_blocks`); only this manager changes these
lists. The manager only keeps the books: the copies it returns are made by the worker, in the order `executor/step.py` describes.
A block must not be overwritten before it was read, so within one step nothing is swapped out after it was made writable, nothing is
swapped in after blocks were freed that a copy reads or writes, and nothing is swapped out after something was swapped in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_engine.executor.step import BlockCopy
from baton_engine.kv_cache.block_pool import Block, BlockPool
from baton_engine.kv_cache.offload import OffloadedBlock, OffloadTier
from baton_engine.kv_cache.sequence import KVSequence
from baton_engine.protocol.block_hash import BlockHash, hash_block, root_hash
from baton_engine.protocol.messages import BlocksStored, KVEvent

NUM_RECENT_REQUESTS = 1000

CachedBlock = Block | OffloadedBlock
"""A block of a prefix that need not be computed."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters since start, and the hit rate of the last `NUM_RECENT_REQUESTS` lookups."""

    requests: int = 0
    """Lookups."""
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    _recent: deque[tuple[int, int]] = field(default_factory=deque)
    """(queries, hits) of each recent lookup."""
    _recent_queries: int = 0
    _recent_hits: int = 0

    @property
    def recent_hit_rate(self) -> float:
        """Fraction of tokens found in the recent lookups, 0 to 1."""
        return self._recent_hits / self._recent_queries if self._recent_queries else 0.0

    def count(self, queries: int, hits: int) -> None:
        self.requests += 1
        self.queries += queries
        self.hits += hits
        self._recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits
        if len(self._recent) > NUM_RECENT_REQUESTS:
            old_queries, old_hits = self._recent.popleft()
            self._recent_queries -= old_queries
            self._recent_hits -= old_hits

    def forget_recent(self) -> None:
        """After a reset of the cache, what was found before says nothing."""
        self._recent.clear()
        self._recent_queries = self._recent_hits = 0


class KVCacheManager:
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
        """
        Args:
            block_size: tokens per block.
            model_key: equal hashes mean equal KV only under the same key; the engine's compatibility hash.
            num_swap_blocks: blocks in host memory for swapped requests.
            num_offload_blocks: slots in host memory for blocks that the prefix cache evicts; 0: they are gone.
            watermark_blocks: blocks that the scheduler wants to stay free when it admits a request; only remembered here.
            enable_events: `take_events` tells what the prefix cache gains and loses.
        """
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self._events: list[KVEvent] | None = [] if enable_events else None
        self.offload = OffloadTier(num_offload_blocks) if num_offload_blocks else None
        self.pool = BlockPool(num_blocks, self._events, self.offload)
        self.swap_pool = BlockPool(num_swap_blocks)
        self.stats = PrefixCacheStats()
        self._model_key = model_key
        self.enable_prefix_caching = enable_prefix_caching
        """May change at any time: what is cached already is found again once it is on."""

    @property
    def usage(self) -> float:
        """Fraction of blocks held, 0 to 1."""
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self.pool.num_free_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        return self.swap_pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_hashes(self, request: KVSequence) -> list[BlockHash]:
        """Chained hashes of the full blocks of the request's known tokens; extended as tokens come."""
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._root(request)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hash_block(parent, request.token_ids[start : start + size])
            hashes.append(parent)
        return hashes

    def block_hashes_until(self, request: KVSequence, num_tokens: int) -> list[BlockHash]:
        """Hashes of the blocks that hold the first `num_tokens` tokens, a partial last one included."""
        num_full, rest = divmod(num_tokens, self.block_size)
        hashes = self.block_hashes(request)[:num_full]
        if rest:
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(hash_block(parent, request.token_ids[num_full * self.block_size : num_tokens]))
        return hashes

    def find_cached_prefix(self, request: KVSequence, max_tokens: int) -> list[CachedBlock]:
        """Cached blocks that hold the request's first tokens, `max_tokens` at most. Takes none of them: `allocate` does."""
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
        self, request: KVSequence, num_tokens: int, cached: Sequence[CachedBlock] = (), *, keep_free: int = 0
    ) -> list[int] | None:
        """Gives `request` the blocks its first `num_tokens` tokens need, `cached` ones first.

        Args:
            cached: just found by `find_cached_prefix`, only for a request that has no blocks yet. Offloaded ones get a block on the
                device, which is findable at once: the step under construction restores it before its tokens run.
            keep_free: so many blocks must stay free if any are taken.

        Returns:
            Ids of the blocks that were added (cached ones included), or None, with nothing changed, if too few are free.
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
        """Lets `child` share the blocks that hold the parent's first `num_tokens` tokens, which are the child's, too.

        A partial last block is shared as well. It may hold, or come to hold, tokens of the parent behind `num_tokens`: no
        request reads positions it has not computed, and `make_writable` gives it a block of its own before it writes
        there. Whoever writes first gets the copy; the last holder of a block writes in place.

        Raises:
            ValueError: the parent's blocks hold fewer tokens, or the child has blocks already.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        if child.blocks or child.swapped_blocks:
            raise ValueError(f"{child.request_id} has KV blocks; free it before it is forked from {parent.request_id}")
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
        """Copy-on-write: afterwards `request` alone holds the blocks of positions [start, end), and they are not findable.

        A block that others hold is replaced by a new one in `request.blocks` and copied whole; the others keep the old
        one. A block that only this request holds stays; if it is in the prefix cache (a forked child may be the last holder of
        a block that its parent filled), it is taken out.

        Returns:
            The copies to be made before the step's tokens run, or None, with nothing changed, if too few blocks are free.

        Raises:
            ValueError: the request has no blocks for these positions; `allocate` first.
        """
        if start >= end:
            return []
        first, last = start // self.block_size, self.num_blocks_for(end)
        if last > len(request.blocks):
            raise ValueError(
                f"{request.request_id} has {len(request.blocks)} KV blocks; positions to {end} need {last}"
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
        """Moves all blocks of these requests to host memory, a block that several of them share once.

        On the device their blocks are freed as `free` does: full cached ones stay findable until they are handed out again, and
        blocks that requests outside the list hold stay theirs.

        Returns:
            Copies from device blocks to host blocks, or None, with nothing changed, if too few host blocks are free.

        Raises:
            ValueError: one of them is swapped out already.
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

    def swap_in(self, requests: Sequence[KVSequence], *, keep_free: int = 0) -> list[BlockCopy] | None:
        """Moves all blocks of these requests back to the device; what they share on the host they share there.

        The new blocks are not in the prefix cache until `cache_blocks` offers them again. Host blocks that swapped requests outside
        the list hold stay theirs.

        Returns:
            Copies from host blocks to device blocks, or None, with nothing changed, if too few are free: what is needed
            plus `keep_free`.

        Raises:
            ValueError: one of them has blocks on the device.
        """
        for request in requests:
            if request.blocks:
                raise ValueError(f"{request.request_id} has KV blocks on the device; it cannot be swapped in")
        num_blocks = len({block.block_id for request in requests for block in request.swapped_blocks})
        if not self._can_take(num_blocks, keep_free):
            return None
        moved, copies = _take_counterparts([request.swapped_blocks for request in requests], self.pool)
        for request, blocks in zip(requests, moved, strict=True):
            self._free_host_blocks(request)
            request.blocks = blocks
        return copies

    def count_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Counts one prefix-cache lookup whose request was admitted."""
        if self.enable_prefix_caching:
            self.stats.count(num_tokens, num_hits)

    def cache_blocks(self, request: KVSequence, num_computed_tokens: int) -> None:
        """Makes the full blocks findable whose tokens have been computed, or proved after a load."""
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
            # Hashes behind the first new one that were known before are repeated: one event tells the whole chain.
            parent = hashes[first_new - 1] if first_new else self._root(request)
            self._events.append(BlocksStored(hashes[first_new:num_full], parent, self.block_size))

    def free(self, request: KVSequence) -> None:
        """Takes all blocks away, on the device and on the host; idempotent."""
        self._free_device_blocks(request)
        self._free_host_blocks(request)

    def take_offload_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """What the step that is now complete stores in the offload tier, and what it restores; see `executor/step.py`."""
        return self.offload.take_copies() if self.offload is not None else ([], [])

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found any more; holders keep their blocks."""
        self.pool.reset()
        self.stats.forget_recent()

    def take_events(self) -> list[KVEvent]:
        """What the prefix cache gained and lost since the last call, in order. Empty unless `enable_events` was set."""
        if not self._events:
            return []
        taken = list(self._events)
        self._events.clear()  # the pool appends to the same list
        return taken

    def _restore(self, cached: Sequence[CachedBlock]) -> list[Block]:
        """The blocks of a prefix, with new ones in place of those that are offloaded. Those on the device must be held."""
        assert self.offload is not None
        offloaded = [block for block in cached if isinstance(block, OffloadedBlock)]
        self.offload.hold(offloaded)  # or the blocks that are taken now could be stored in their place
        restored = self.pool.allocate(len(offloaded))
        for source, block in zip(offloaded, restored, strict=True):
            self.offload.restore(source, block.block_id)
            self.pool.cache(block, source.block_hash)
        targets = iter(restored)
        return [block if isinstance(block, Block) else next(targets) for block in cached]

    def _can_take(self, num_blocks: int, keep_free: int = 0) -> bool:
        """Taking nothing is always possible, even if fewer than `keep_free` blocks are free."""
        return num_blocks == 0 or num_blocks + keep_free <= self.pool.num_free_blocks

    def _free_device_blocks(self, request: KVSequence) -> None:
        blocks, request.blocks = request.blocks, []
        request.num_cached_blocks = 0
        self.pool.free(blocks)

    def _free_host_blocks(self, request: KVSequence) -> None:
        blocks, request.swapped_blocks = request.swapped_blocks, []
        self.swap_pool.free(blocks)

    def _root(self, request: KVSequence) -> BlockHash:
        return root_hash(self._model_key, request.cache_salt, request.lora_name)


def _take_counterparts(
    tables: Sequence[Sequence[Block]], target: BlockPool
) -> tuple[list[list[Block]], list[BlockCopy]]:
    """Takes a block of `target` for every distinct block in `tables`, with as many holders as it has there."""
    distinct = list(dict.fromkeys(block for table in tables for block in table))
    counterpart = dict(zip(distinct, target.allocate(len(distinct)), strict=True))
    taken: set[Block] = set()
    moved: list[list[Block]] = []
    for table in tables:
        new_table = [counterpart[block] for block in table]
        target.touch(block for block in new_table if block in taken)  # `allocate` has counted the first holder
        taken.update(new_table)
        moved.append(new_table)
    return moved, [BlockCopy(old.block_id, new.block_id) for old, new in counterpart.items()]


class SlotUse(NamedTuple):
    """KV slots of the blocks that some requests hold; shared blocks count once."""

    used: int
    """Slots that hold the KV of a token of one of the requests."""
    allocated: int
    """Slots in the blocks."""

    @property
    def waste(self) -> float:
        """Fraction of the allocated slots that hold nothing, 0 to 1 (Kwon et al. 2023, section 3.1)."""
        return 1.0 - self.used / self.allocated if self.allocated else 0.0


def count_slots(requests: Iterable[KVSequence], block_size: int) -> SlotUse:
    """Measures memory waste over live requests; O(blocks), so for benchmarks rather than for every step."""
    used_of: dict[int, int] = {}
    for request in requests:
        for index, block in enumerate(request.blocks):
            used = min(max(request.num_computed_tokens - index * block_size, 0), block_size)
            used_of[block.block_id] = max(used, used_of.get(block.block_id, 0))
    return SlotUse(sum(used_of.values()), len(used_of) * block_size)
