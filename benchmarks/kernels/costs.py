"""The bytes that an operation moves and the floating-point operations that it does.

There is one function per operation of `baton_kernels`, and the docstring of the operation's folder
states the same count in words. All GB/s and TFLOP/s of the benchmark come from here. A count
contains what the formula needs: each element once per read or write, and no temporary memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Cost(NamedTuple):
    """What one call costs."""

    nbytes: int
    flops: int = 0  #: A multiply-add is two. 0: not counted, because memory limits the operation.


def attention(
    query: Tensor, key_cache: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> Cost:
    """Count keys, values, queries, results and block ids; two products per visible key."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    keys = sum(seq_lens) * num_kv_heads * head_dim * key_cache.itemsize
    block_ids = 4 * sum(-(-length // block_size) for length in seq_lens)
    pairs = sum(
        q * length - q * (q - 1) // 2 for q, length in zip(query_lens, seq_lens, strict=True)
    )
    return Cost(2 * keys + 2 * query.nbytes + block_ids, 4 * query.shape[1] * head_dim * pairs)


def kv_write(key: Tensor, slot_mapping: Tensor) -> Cost:
    """Count keys and values, read and written, and the slots."""
    return Cost(4 * key.nbytes + slot_mapping.nbytes)


def block_copy(kv_cache: Tensor, num_pairs: int) -> Cost:
    """Count blocks, read and written on one device."""
    return Cost(2 * num_pairs * kv_cache[0].nbytes)


def block_swap(kv_cache: Tensor, num_pairs: int) -> Cost:
    """Count the bytes that cross between host and device."""
    return Cost(num_pairs * kv_cache[0].nbytes)


def block_checksum(run_nbytes: int, num_runs: int) -> Cost:
    """Count the runs, read."""
    return Cost(run_nbytes * num_runs)


def sampling(logits: Tensor) -> Cost:
    """Count the logits, read once."""
    return Cost(logits.nbytes)


def elementwise(arguments: Sequence[Tensor], results: Sequence[Tensor]) -> Cost:
    """Count rows, read and written. For norm and activation; weights of a norm are not counted."""
    return Cost(sum(tensor.nbytes for tensor in (*arguments, *results)))


def rope(angles: Sequence[Tensor], results: Sequence[Tensor]) -> Cost:
    """Count queries and keys, read and written, and the angles. Values are not read."""
    return Cost(sum(tensor.nbytes for tensor in (*angles, *results, *results)))


def experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor) -> Cost:
    """Count the chosen experts' weights, and tokens in and out; three products per choice."""
    weights = len(expert_ids.unique()) * (gate_up[0].nbytes + down[0].nbytes)
    return Cost(weights + 2 * x.nbytes, 6 * expert_ids.numel() * down[0].numel())
