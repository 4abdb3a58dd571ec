"""Word sums in torch's int64, which wraps. For tests, and for CPUs without compiled operations."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 8
PERIOD = 8192  #: Number of words after which the first factor of the weights repeats.
OUTER_OFFSET = 2**32  #: The second factor of period p is u(OUTER_OFFSET + p).


def word_sums_reference(words: Tensor) -> Tensor:
    """Return the checksum (word sum) of each row of `words` [n, num_words], as int64 [n]."""
    num_words = words.shape[1]
    inner, outer = (
        factors(0, min(num_words, PERIOD)),
        factors(OUTER_OFFSET, -(-num_words // PERIOD)),
    )
    sums = words.new_zeros(len(words))
    for period, factor in enumerate(outer):
        part = words[:, period * PERIOD : (period + 1) * PERIOD]
        folded = part ^ _shifted(part, 32)
        sums += (folded * inner[: part.shape[1]]).sum(1) * factor
    return sums


def sum_runs_reference(addresses: NDArray[np.int64], nbytes: int) -> NDArray[np.uint64]:
    """Implement `baton_kernels.block_checksum.sum_runs` in torch, with one thread."""
    sums = np.zeros(len(addresses), dtype=np.uint64)
    if nbytes:
        for row, address in enumerate(addresses.tolist()):
            run = torch.frombuffer(
                (ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.int64
            )
            sums[row] = word_sums_reference(run[None]).numpy().view(np.uint64)[0]
    return sums


@functools.lru_cache(maxsize=8)
def factors(start: int, count: int) -> Tensor:
    """Return u(k) for k in [start, start + count), as int64.

    The weight of a word in the word sum is the product of two values of u. The module docstring of
    `baton_kernels.block_checksum` defines u.
    """
    z = torch.arange(start, start + count) + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right by `bits`, with zeros shifted in. torch's shift repeats the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
