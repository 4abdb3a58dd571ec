"""Word sums of KV blocks, by which the KV connector verifies transferred blocks.

A run is a contiguous range of memory. Its word sum is:

    x_i   the run's i-th 64-bit little-endian word
    y_i = x_i XOR (x_i >> 32)
    w_i = u(i mod 8192) * u(2^32 + i div 8192)
    u(k) = mix(k + 0x9E3779B97F4A7C15) OR 1       mix is splitmix64's finalizer
    sum = (y_0 w_0 + y_1 w_1 + ...) mod 2^64      in any order

All implementations return the same bits: C++ (../cpu/source/block_checksum.h), torch
(reference.py), Triton (triton_kernel.py), and numpy in the KV connector.

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       the runs, read once
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.block_checksum.reference import WORD_BYTES, sum_runs_reference


def sum_runs(addresses: NDArray[np.int64], nbytes: int, num_threads: int = 1) -> NDArray[np.uint64]:
    """Compute the checksum (word sum) of each of n runs of host memory.

    A run is a contiguous range of memory. Its word sum adds its 64-bit words modulo 2**64, each
    word mixed and weighted by position (see the module docstring). The C++ version releases the
    GIL.

    Args:
        addresses: address of each run, int64 [n], with any alignment.
        nbytes: number of bytes of every run, a multiple of 8.
        num_threads: number of threads. The default is 1, because model steps use the other
            processors at the same time.

    Returns:
        The sums, uint64 [n].

    Raises:
        ValueError: addresses is not one-dimensional, or nbytes or num_threads is out of range.
    """
    if addresses.ndim != 1:
        raise ValueError(f"addresses must be [n], not {list(addresses.shape)}")
    if nbytes < 0 or nbytes % WORD_BYTES or num_threads < 1:
        raise ValueError(
            f"a run must be a multiple of {WORD_BYTES} bytes, not {nbytes}, "
            f"and num_threads at least 1, not {num_threads}"
        )
    if cpu.OPS is None:
        return sum_runs_reference(addresses, nbytes)
    addresses = np.ascontiguousarray(addresses, dtype=np.int64)
    sums = np.empty(len(addresses), dtype=np.uint64)
    cpu.OPS.sum_runs(sums.ctypes.data, addresses.ctypes.data, len(addresses), nbytes, num_threads)
    return sums


def block_sums(kv_cache: Tensor, block_ids: Tensor, first_head: int, num_heads: int) -> Tensor:
    """Compute the checksum of a range of heads in each given block, on the cache's device.

    The checksum is the word sum of `sum_runs`. On a GPU the call does not wait for the device.

    Args:
        kv_cache: tensor of shape [num_blocks, heads, ...], contiguous.
        block_ids: ids of the blocks, int64 [n], in host memory.
        first_head: first head of the range, an index into the heads of this cache.
        num_heads: number of heads in the range, at least 1.

    Returns:
        The uint64 sums, with their bits stored as int64 [n], on the cache's device.

    Raises:
        ValueError: the cache is not contiguous, the range is not within its heads, block_ids is not
            int64 [n] in host memory, or the size of a block's head is not a multiple of 8 bytes.
        IndexError: a block lies outside the cache.
    """
    if kv_cache.dim() < 3 or not kv_cache.is_contiguous():
        raise ValueError(
            "a cache must be contiguous, of shape [num_blocks, heads, ...], "
            f"not {list(kv_cache.shape)}"
        )
    num_blocks, cache_heads = kv_cache.shape[:2]
    if first_head < 0 or num_heads < 1 or first_head + num_heads > cache_heads:
        raise ValueError(
            f"the cache has {cache_heads} heads, not [{first_head}, {first_head + num_heads})"
        )
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1 or block_ids.is_cuda:
        raise ValueError(
            "block ids must be int64 [n] in host memory, "
            f"not {block_ids.dtype} {list(block_ids.shape)}"
        )
    if len(block_ids) and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < num_blocks:
        raise IndexError(f"block ids lie outside the cache's {num_blocks} blocks")
    head_nbytes = kv_cache[0, 0].nbytes if num_blocks else 0
    if head_nbytes % WORD_BYTES:
        raise ValueError(
            f"a head of a block must be a multiple of {WORD_BYTES} bytes, not {head_nbytes}"
        )
    if kv_cache.is_cuda:
        from baton_kernels.block_checksum.triton_kernel import block_sums_triton

        return block_sums_triton(kv_cache, block_ids, first_head, num_heads)
    addresses = kv_cache.data_ptr() + (block_ids * cache_heads + first_head) * head_nbytes
    return torch.from_numpy(sum_runs(addresses.numpy(), num_heads * head_nbytes).view(np.int64))
