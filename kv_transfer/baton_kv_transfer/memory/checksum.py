"""The checksum of a range of heads of a KV block, bound to the load and to the block's tokens.

    x_i   i-th 64-bit little-endian word of the range
    y_i = x_i XOR (x_i >> 32)                   each bit of x_i affects several bits of the sum
    w_i = u(i mod 8192) * u(2^32 + i div 8192)  odd weights: a change of one word changes the sum
                                                u(k) = mix(k + 0x9E3779B97F4A7C15) OR 1,
                                                mix is splitmix64's finalizer
    sum = (y_0 w_0 + y_1 w_1 + ...) mod 2^64    the order of the terms does not matter

    checksum = BLAKE2b(sum, generation, first head, number of heads, transfer id),
               digest_size = 8, key = chain hash, person = "baton-kv"

The digest is read as a little-endian integer. `sum` and `generation` take 8 bytes each, the two
numbers of heads 4 bytes each, all little-endian. The transfer id is UTF-8. The generation is a
random number that the consumer chose for the load.

The first factors of the weights, u(0) to u(8191), take 64 KiB for any block size and stay in a
core's cache. This module computes the sum with numpy. `baton_kernels.block_checksum` computes the
same sum with compiled code and on GPUs. The checksum finds torn, stale and misplaced blocks, but
does not protect against forged blocks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory.layout import HeadRange
from baton_protocol.block_hash import BlockHash

WORD_BYTES = 8
#: Number of words after which the first factor of the weights repeats.
PERIOD = 8192
_OUTER_OFFSET = 2**32

#: A function (addresses [n], bytes of each run) -> word sums [n], like `sum_runs`.
SumRuns = Callable[[NDArray[np.int64], int], NDArray[np.uint64]]


def sum_runs(addresses: NDArray[np.int64], nbytes: int) -> NDArray[np.uint64]:
    """Return the word sum of each run of host memory: [n].

    A run is a contiguous range of memory. The word sum is `sum` in the module's formula.

    Args:
        addresses: address of each run, [n].
        nbytes: size of every run, a multiple of 8.
    """
    num_words = nbytes // WORD_BYTES
    inner, outer = (
        _factors(0, min(num_words, PERIOD)),
        _factors(_OUTER_OFFSET, -(-num_words // PERIOD)),
    )
    sums = np.zeros(len(addresses), dtype=np.uint64)
    for row, address in enumerate(addresses.tolist()):
        words = np.ctypeslib.as_array(
            ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (num_words,)
        )
        total = 0
        for index, weight in enumerate(outer.tolist()):
            chunk = words[index * PERIOD : (index + 1) * PERIOD]
            mixed = chunk >> np.uint64(32)
            mixed ^= chunk
            total += int(np.dot(mixed, inner[: len(mixed)])) * weight
        sums[row] = total % 2**64
    return sums


def bind(
    word_sum: int, *, transfer_id: str, generation: int, chain_hash: BlockHash, heads: HeadRange
) -> int:
    """Return the checksum for PUBLISH: a word sum bound to the load, the heads and the tokens.

    Args:
        word_sum: word sum of the block, from `sum_runs`.
        transfer_id: id of the transfer.
        generation: random number that the consumer chose for the load, 0 to 2^64 - 1.
        chain_hash: hash of the tokens of the block and of all blocks before it.
        heads: heads of the model that the sum covers.
    """
    digest = hashlib.blake2b(
        word_sum.to_bytes(8, "little"), digest_size=8, key=chain_hash, person=b"baton-kv"
    )
    digest.update(
        generation.to_bytes(8, "little")
        + heads.first.to_bytes(4, "little")
        + heads.count.to_bytes(4, "little")
    )
    digest.update(transfer_id.encode())
    return int.from_bytes(digest.digest(), "little")


@functools.lru_cache(maxsize=8)
def _factors(start: int, count: int) -> NDArray[np.uint64]:
    """Return u(k) of the module's formula, for k in [start, start + count)."""
    z = np.arange(start, start + count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
