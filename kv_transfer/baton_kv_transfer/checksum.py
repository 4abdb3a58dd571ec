"""Checksum of a KV block: computed from the bytes where they lie, bound to the transfer and to the block's tokens.

    x_i   the block's i-th 64-bit little-endian word
    y_i = x_i XOR (x_i >> 32)                     so that a flip of the highest bit meets more than one bit of the weight
    w_i = mix(i + 0x9E3779B97F4A7C15) OR 1         position weights, odd: any change of a single word changes the sum;
                                                  mix is splitmix64's finalizer, see `weights`
    sum = (y_0 w_0 + y_1 w_1 + ...) mod 2^64      in any order: a parallel reduction gives the same

    checksum = first 8 bytes, little-endian, of BLAKE2b(sum, transfer id, chain hash)

The sum needs integer multiplication and addition only and can be computed by a GPU kernel; binding it happens on the host.
It finds torn, stale and misplaced blocks; it is no defence against someone who forges them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from baton_engine.protocol.block_hash import BlockHash

WORD_BYTES = 8


@functools.lru_cache(maxsize=4)
def weights(num_words: int) -> NDArray[np.uint64]:
    """w_i for i in [0, num_words)."""
    z = np.arange(num_words, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def block_sum(address: int, nbytes: int) -> int:
    """The weighted sum of host memory [address, address + nbytes).

    Args:
        nbytes: a multiple of 8.
    """
    words = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (nbytes // WORD_BYTES,))
    mixed = words >> np.uint64(32)
    mixed ^= words
    return int(np.dot(mixed, weights(len(words))))


def bind(word_sum: int, transfer_id: str, chain_hash: BlockHash) -> int:
    """The checksum that travels: right bytes of the wrong block or transfer do not pass."""
    digest = hashlib.blake2b(word_sum.to_bytes(8, "little"), digest_size=8, key=chain_hash, person=b"baton-kv")
    digest.update(transfer_id.encode())
    return int.from_bytes(digest.digest(), "little")
