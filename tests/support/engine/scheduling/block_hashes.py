"""Hashes of all full blocks of a sequence.

For the tests of the KV cache, the hand-off and the block hash.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.block_hash import BlockHash, hash_block


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids`, in order."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
