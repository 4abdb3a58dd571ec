"""Paged attention: queries of many sequences over keys and values in fixed-size blocks.

For the query at position p of a sequence, and its query head h in the group of KV head
g = h // (num_heads / num_kv_heads):

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

With a sliding window (Beltagy et al. 2020), the sum is over p - window < t <= p.

One call serves prefill chunks and decode steps together (varlen). Sequence s owns the query rows
`cu_seqlens_q[s] : cu_seqlens_q[s + 1]`, the last ones of its `seq_lens[s]` tokens. Slots of its
last block past `seq_lens[s]` may hold stale bytes or NaN, which never affect the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton_kernels import cpu as compiled  # this folder has a module named cpu

if TYPE_CHECKING:
    from baton_kernels.attention.cpu import AttentionPlan


def plan_attention(
    key_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
) -> AttentionPlan | None:
    """Compute once what all layers of a step share. Other arguments as in `paged_attention`.

    Args:
        key_cache: the cache of any layer. All layers have the same shape and strides.

    Returns:
        None for Triton and C++, which prepare nothing.

    Raises:
        ValueError: the device's implementation does not support the cache's strides.
    """
    if key_cache.is_cuda or (compiled.OPS is not None and key_cache.dtype in compiled.DTYPES):
        return None
    from baton_kernels.attention.cpu import AttentionPlan

    return AttentionPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    plan: AttentionPlan | None = None,
    *,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention with grouped query heads, on the device of `query`.

    On a GPU the call does not wait for the device. Its launches depend only on shapes and host
    values, so a CUDA graph can capture them and replay them with other lengths and block tables.

    Args:
        query: of shape [num_tokens, num_heads, head_dim].
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim], in query's dtype.
            The last stride is 1. On a CPU the tokens of a block and head are contiguous, and the
            other strides are multiples of their size.
        value_cache: like key_cache, with the same strides.
        block_tables: int32 block ids of each sequence, of shape [num_seqs, max_blocks_per_seq].
            Padding is not read.
        cu_seqlens_q: int32 prefix sum of query lengths, of shape [num_seqs + 1].
        seq_lens: int32 tokens of each sequence including its queries, of shape [num_seqs].
        scale: positive factor of the scores, usually head_dim ** -0.5.
        window: tokens that a query sees, itself included. At least 1; None for all.
        plan: result of `plan_attention` for the same arguments. None computes it here.
        max_seqlen_q: upper bound of a sequence's queries, if the host knows one. With few queries
            per sequence (decode), a GPU splits long sequences.
        out: receives the result. Shape and dtype of query, last stride 1.

    Returns:
        Tensor of shape [num_tokens, num_heads, head_dim] in query's dtype. A sequence of length 0
        gets zeros.

    Raises:
        ValueError: dtypes, heads, scale or window are invalid, or the device's implementation
            does not support the strides.
    """
    _check(query, key_cache, scale, window)
    if query.is_cuda:
        from baton_kernels.attention.triton_kernel import paged_attention_triton

        return paged_attention_triton(
            query,
            key_cache,
            value_cache,
            block_tables,
            cu_seqlens_q,
            seq_lens,
            scale,
            window,
            max_seqlen_q=max_seqlen_q,
            out=out,
        )
    if compiled.OPS is not None and key_cache.dtype in compiled.DTYPES:
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        sequences = (block_tables, cu_seqlens_q, seq_lens)
        compiled.OPS.paged_attention(out, query, key_cache, value_cache, *sequences, scale, window)
        return out
    from baton_kernels.attention.cpu import AttentionPlan, paged_attention_cpu

    plan = plan or AttentionPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)
    attended = paged_attention_cpu(query, key_cache, value_cache, plan, scale)
    return attended if out is None else out.copy_(attended)


def _check(query: Tensor, key_cache: Tensor, scale: float, window: int | None) -> None:
    """Raise ValueError for arguments that no implementation supports. Reads no tensor's values."""
    if key_cache.dtype != query.dtype:
        raise ValueError(
            f"queries of {query.dtype} need caches of the same dtype, not {key_cache.dtype}"
        )
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key_cache.shape[1]} KV heads evenly"
        )
    if scale <= 0 or (window is not None and window < 1):
        raise ValueError(f"scale and window must be positive: {scale}, {window}")
