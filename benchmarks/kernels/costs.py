"""Counts the bytes and the floating-point operations (FLOPs) of each operation.

There is one function per operation of `baton_kernels`. The docstring of the operation's package
states the same count in words. All GB/s and TFLOP/s of the benchmark are computed from these
counts. Each element that the formula reads or writes counts once for each read or write. Temporary
memory and the weights of a norm do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from baton_kernels.linear import PackedWeight


class Cost(NamedTuple):
    """The bytes and the FLOPs of one call of an operation."""

    nbytes: int
    flops: int = 0  #: A multiply-add counts as two. 0: not counted, as memory is the limit.


def attention(
    query: Tensor,
    key_cache: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: int | None,
) -> Cost:
    """Return the cost of attention: keys, values, queries, results and block ids.

    Keys to which no query of a sequence attends are not counted, nor are their values and block
    ids. The FLOPs are two products for each query and each key to which the query attends.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_keys = num_block_ids = num_pairs = 0
    for num_queries, length in zip(query_lens, seq_lens, strict=True):
        limit = length if window is None else window
        oldest = max(0, length - num_queries - limit + 1)
        num_keys += length - oldest
        num_block_ids += -(-length // block_size) - oldest // block_size
        num_pairs += sum(min(end, limit) for end in range(length - num_queries + 1, length + 1))
    key_nbytes = num_keys * num_kv_heads * head_dim * key_cache.itemsize
    return Cost(
        2 * key_nbytes + 2 * query.nbytes + 4 * num_block_ids,
        4 * query.shape[1] * head_dim * num_pairs,
    )


def kv_write(key: Tensor, slot_mapping: Tensor) -> Cost:
    """Return the cost of a KV write: keys and values are read and written, slots are read."""
    return Cost(4 * key.nbytes + slot_mapping.nbytes)


def block_copy(kv_cache: Tensor, num_pairs: int) -> Cost:
    """Return the cost of copying blocks on one device: each block is read and written."""
    return Cost(2 * num_pairs * kv_cache[0].nbytes)


def block_swap(kv_cache: Tensor, num_pairs: int) -> Cost:
    """Return the cost of a swap: the bytes that move between host and device."""
    return Cost(num_pairs * kv_cache[0].nbytes)


def block_checksum(run_nbytes: int, num_runs: int) -> Cost:
    """Return the cost of checksums: each run of contiguous bytes is read once."""
    return Cost(run_nbytes * num_runs)


def sampling(logits: Tensor) -> Cost:
    """Return the cost of sampling: the logits are read once."""
    return Cost(logits.nbytes)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Cost:
    """Return the cost of a linear layer: x, weight and bias are read, and the result is written.

    The FLOPs are one product for each row of x.
    """
    out_features, in_features = weight.shape
    num_rows = x.numel() // in_features
    weight_nbytes = out_features * in_features * weight.dtype.itemsize
    nbytes = x.nbytes + weight_nbytes + num_rows * out_features * x.itemsize
    if bias is not None:
        nbytes += bias.nbytes
    return Cost(nbytes, 2 * num_rows * in_features * out_features)


def elementwise(arguments: Sequence[Tensor], results: Sequence[Tensor]) -> Cost:
    """Return the cost of a norm or activation: arguments are read and results are written."""
    return Cost(sum(tensor.nbytes for tensor in (*arguments, *results)))


def rope(angles: Sequence[Tensor], results: Sequence[Tensor]) -> Cost:
    """Return the cost of RoPE: queries and keys are read and written, angles are read.

    Values are not counted, because RoPE does not read them.
    """
    return Cost(sum(tensor.nbytes for tensor in (*angles, *results, *results)))


def experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor) -> Cost:
    """Return the cost of an MoE layer: weights of the chosen experts, and tokens in and out.

    The FLOPs are three products for each token and each of its experts.
    """
    weights = len(expert_ids.unique()) * (gate_up[0].nbytes + down[0].nbytes)
    return Cost(weights + 2 * x.nbytes, 6 * expert_ids.numel() * down[0].numel())
