"""The tokens of one sequence and the KV blocks that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.kv_cache.block_pool import Block
from baton_engine.protocol.block_hash import BlockHash


@dataclass(slots=True, eq=False)
class KVSequence:
    """What the KV cache manager sees of a request. The manager alone writes the block fields; the scheduler writes the rest."""

    request_id: str
    token_ids: list[int]
    """All known tokens: prompt, then generated."""
    cache_salt: str = ""
    lora_name: str = ""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in `blocks` once all steps scheduled so far have run."""

    blocks: list[Block] = field(default_factory=list)
    swapped_blocks: list[Block] = field(default_factory=list)
    """Host blocks with its KV while it is swapped out."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_cached_blocks: int = 0
    """Leading blocks already offered to the prefix cache."""

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
