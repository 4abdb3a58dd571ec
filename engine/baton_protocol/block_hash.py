"""Chained hashes of KV blocks.

Blocks with equal hashes have the same tokens from the start of the sequence, the same model and the
same cache salt. The prefix cache finds blocks by their hashes. A KV transfer includes the hash in
the block's checksum, so that the bytes of another block fail verification.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

#: 16 bytes of BLAKE2b.
BlockHash = bytes

DIGEST_BYTES = 16


def root_hash(model_key: str, cache_salt: str = "") -> BlockHash:
    """Return the hash to use as the parent of a sequence's first block.

    Sequences with different model keys or cache salts get different block hashes.
    """
    encoded = [key.encode() for key in (model_key, cache_salt)]
    # The length before each key keeps pairs such as ("ab", "c") and ("a", "bc") distinct.
    keys = b"".join(struct.pack("<q", len(key)) + key for key in encoded)
    return hashlib.blake2b(keys, digest_size=DIGEST_BYTES, person=b"baton-root").digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full or partial block.

    Args:
        parent: hash of the previous block, or the root hash for a sequence's first block.
        token_ids: token ids of the block.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(
        parent + packed, digest_size=DIGEST_BYTES, person=b"baton-block"
    ).digest()
