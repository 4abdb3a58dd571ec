"""The tokens and the KV blocks of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.kv_cache.block_pool import Block
from baton_protocol.block_hash import BlockHash


@dataclass(slots=True, eq=False)
class KVSequence:
    """The tokens and the KV blocks of one sequence.

    Only the KV cache manager writes `blocks`, `swapped_blocks`, `block_hashes` and
    `num_cached_blocks`.
    """

    request_id: str
    #: All known tokens: prompt, then generated.
    token_ids: list[int]
    #: Sequences with different salts share no cached blocks.
    cache_salt: str = ""
    #: Number of leading tokens whose KV is in `blocks` after all steps scheduled so far.
    num_computed_tokens: int = 0

    blocks: list[Block] = field(default_factory=list)
    #: Host blocks that hold the KV while the sequence is swapped out.
    swapped_blocks: list[Block] = field(default_factory=list)
    #: Chained hashes of the full blocks that have been hashed so far.
    block_hashes: list[BlockHash] = field(default_factory=list)
    #: Number of leading blocks that `cache_blocks` has processed already.
    num_cached_blocks: int = 0

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
