"""Gives requests their KV blocks: prefix-cache lookup, allocation, caching of completed blocks.

A request's blocks are on the request (`Request.blocks`); nobody but this manager changes that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.core.block_pool import Block, BlockPool
from baton_engine.core.request import Request
from baton_engine.protocol.block_hash import BlockHash, hash_block, root_hash


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters since start, in tokens."""

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, model_key: str, *, enable_prefix_caching: bool = True) -> None:
        """
        Args:
            block_size: tokens per block.
            model_key: equal hashes mean equal KV only under the same key; the engine's compatibility hash.
        """
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.stats = PrefixCacheStats()
        self._model_key = model_key
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def usage(self) -> float:
        """Fraction of blocks held, 0 to 1."""
        return self.pool.usage

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_hashes(self, request: Request) -> list[BlockHash]:
        """Chained hashes of the full blocks of the request's known tokens; extended as tokens come."""
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._root(request)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hash_block(parent, request.token_ids[start : start + size])
            hashes.append(parent)
        return hashes

    def block_hashes_until(self, request: Request, num_tokens: int) -> list[BlockHash]:
        """Hashes of the blocks that hold the first `num_tokens` tokens, a partial last one included."""
        num_full, rest = divmod(num_tokens, self.block_size)
        hashes = self.block_hashes(request)[:num_full]
        if rest:
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(hash_block(parent, request.token_ids[num_full * self.block_size : num_tokens]))
        return hashes

    def find_cached_prefix(self, request: Request, max_tokens: int) -> list[Block]:
        """Cached blocks that hold the request's first tokens, `max_tokens` at most. Takes none of them: `allocate` does."""
        blocks: list[Block] = []
        if self._enable_prefix_caching:
            for block_hash in self.block_hashes(request)[: max_tokens // self.block_size]:
                block = self.pool.find(block_hash)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def allocate(self, request: Request, num_tokens: int, cached: Sequence[Block] = ()) -> list[int] | None:
        """Gives `request` the blocks its first `num_tokens` tokens need, `cached` ones first.

        Args:
            cached: from `find_cached_prefix`, only for a request that has no blocks yet.

        Returns:
            Ids of the blocks that were added (cached ones included), or None, with nothing changed, if too few are free.
        """
        num_new = max(0, self.num_blocks_for(num_tokens) - len(request.blocks) - len(cached))
        num_revived = sum(block.ref_count == 0 for block in cached)
        if num_new + num_revived > self.pool.num_free_blocks:
            return None
        self.pool.touch(cached)
        added = [*cached, *self.pool.allocate(num_new)]
        request.blocks.extend(added)
        return [block.block_id for block in added]

    def count_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Counts one prefix-cache lookup whose request was admitted."""
        if self._enable_prefix_caching:
            self.stats.queries += num_tokens
            self.stats.hits += num_hits

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes the full blocks findable whose tokens have been computed, or proved after a load."""
        if not self._enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        if num_full > request.num_cached_blocks:
            hashes = self.block_hashes(request)
            for index in range(request.num_cached_blocks, num_full):
                self.pool.cache(request.blocks[index], hashes[index])
            request.num_cached_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes all blocks away; idempotent."""
        blocks, request.blocks = request.blocks, []
        request.num_cached_blocks = 0
        self.pool.free(blocks)

    def reset_prefix_cache(self) -> None:
        self.pool.reset()

    def _root(self, request: Request) -> BlockHash:
        return root_hash(self._model_key, request.cache_salt, request.lora_name)
