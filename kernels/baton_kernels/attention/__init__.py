"""Paged attention: queries of many sequences against keys and values that lie in fixed-size blocks.

For the query at position p of a sequence, and its query head h in the group of KV head g = h // (num_heads / num_kv_heads):

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

Options, each off by default:

    sliding window (Beltagy et al. 2020)     the sum is over p - window < t <= p
    soft cap (Gemma Team 2024)               scores = cap * tanh(scores / cap), of the scores scale * q[h] . K[g, t]
    fp8 caches                               K[g, t] = key_scale[g] * what the key cache holds, V likewise

No model of the engine sets the soft cap or has fp8 caches yet; planned models need both.

One entry serves prefill chunks and decode steps together (varlen): sequence s owns the query rows
`cu_seqlens_q[s] : cu_seqlens_q[s + 1]`, which are the last ones of its `seq_lens[s]` tokens. Slots of its last block past
`seq_lens[s]` hold stale bytes, NaN perhaps, and never reach the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton_kernels import cpu as compiled  # "cpu" is the name of a file of this folder

if TYPE_CHECKING:
    from baton_kernels.attention.cpu import AttentionPlan


def plan_attention(
    key_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
) -> AttentionPlan | None:
    """Computes once what the layers of a step have in common. Arguments as of `paged_attention`.

    Args:
        key_cache: of any layer: the others' have the same shape and strides.

    Returns:
        None where there is nothing to prepare: in Triton and C++.

    Raises:
        ValueError: if the cache's strides are not what the device's implementation addresses.
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
    soft_cap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention with grouped query heads, by device of `query`.

    Args:
        query: of shape [num_tokens, num_heads, head_dim].
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim], dtype of query or float8_e4m3fn; any strides, the last
            one 1. On a CPU the tokens of a block and head lie one after the other, and other strides are multiples of their size.
        value_cache: like key_cache, with the same strides.
        block_tables: int32 block ids of each sequence, of shape [num_seqs, max_blocks_per_seq]; padding is not read.
        cu_seqlens_q: int32 prefix sum of query lengths, of shape [num_seqs + 1].
        seq_lens: int32 tokens of each sequence including its queries, of shape [num_seqs].
        scale: multiplies the scores, usually head_dim ** -0.5; positive.
        window: each query sees at most so many tokens, itself included; at least 1. None: all.
        plan: what `plan_attention` made of the same arguments; None: it is made now.
        soft_cap: bounds the scores; positive.
        key_scale: float32 of shape [num_kv_heads], positive; with fp8 caches, and only with them.
        value_scale: like key_scale.
        max_seqlen_q: queries of a sequence at most, as far as the host knows; a GPU splits long sequences of few queries (decode).
        out: written and returned if given: contiguous in the last dimension, shape and dtype of query.

    Returns:
        Of shape [num_tokens, num_heads, head_dim], dtype of query. A sequence of length 0 has zeros. On a GPU nothing waits for the
        device, and the launches depend only on shapes and numbers given: they can be captured in a graph, and replayed with other
        lengths and block tables.

    Raises:
        ValueError: options that contradict one another, or strides that the device's implementation does not address.
    """
    _check(query, key_cache, scale, window, soft_cap, key_scale, value_scale)
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
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
            max_seqlen_q=max_seqlen_q,
            out=out,
        )
    if compiled.OPS is not None and key_cache.dtype in compiled.DTYPES:
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        sequences = (block_tables, cu_seqlens_q, seq_lens)
        compiled.OPS.paged_attention(
            out, query, key_cache, value_cache, *sequences, scale, window, soft_cap
        )
        return out
    if soft_cap is not None or key_scale is not None:
        from baton_kernels.attention.reference import paged_attention_reference

        attended = paged_attention_reference(
            query,
            key_cache,
            value_cache,
            block_tables,
            cu_seqlens_q,
            seq_lens,
            scale,
            window,
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    else:
        from baton_kernels.attention.cpu import AttentionPlan, paged_attention_cpu

        plan = plan or AttentionPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)
        attended = paged_attention_cpu(query, key_cache, value_cache, plan, scale)
    return attended if out is None else out.copy_(attended)


def _check(
    query: Tensor,
    key_cache: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Raises ValueError for what no implementation computes; looks at no tensor's values."""
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    if (key_scale is not None, value_scale is not None) != (is_fp8, is_fp8):
        raise ValueError(
            f"key_scale and value_scale go with float8_e4m3fn caches, and these are {key_cache.dtype}"
        )
    if not is_fp8 and key_cache.dtype != query.dtype:
        raise ValueError(
            f"queries of {query.dtype} need caches of the same dtype or float8_e4m3fn, not {key_cache.dtype}"
        )
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key_cache.shape[1]} KV heads evenly"
        )
    if (
        scale <= 0
        or (window is not None and window < 1)
        or (soft_cap is not None and soft_cap <= 0)
    ):
        raise ValueError(
            f"scale, window and soft_cap must be positive: {scale}, {window}, {soft_cap}"
        )
