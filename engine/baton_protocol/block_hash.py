"""Chained hashes of KV blocks.

Equal hashes mean equal tokens from the start of the sequence, under the same keys. The prefix
cache and routers find blocks by them. The KV hand-off binds checksums to them, so that the bytes
of another block fail verification.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

#: 16 bytes of BLAKE2b.
BlockHash = bytes

DIGEST_BYTES = 16


def root_hash(model_key: str, cache_salt: str = "") -> BlockHash:
    """Return the parent of a sequence's first block. It separates models and salts."""
    encoded = [key.encode() for key in (model_key, cache_salt)]
    # With its length in front, no key can run into the next.
    keys = b"".join(struct.pack("<q", len(key)) + key for key in encoded)
    return hashlib.blake2b(keys, digest_size=DIGEST_BYTES, person=b"baton-root").digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a block, full or partial.

    Args:
        parent: hash of the block before it, or the root hash.
        token_ids: token ids of the block.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(
        parent + packed, digest_size=DIGEST_BYTES, person=b"baton-block"
    ).digest()
