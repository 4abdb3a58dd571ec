"""Paged attention: queries of many sequences over keys and values in fixed-size blocks.

For the query at position p of a sequence, and its query head h in the group of KV head
g = h // (num_heads / num_kv_heads):

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

Options, each off by default:

    sliding window (Beltagy et al. 2020)   the sum is over p - window < t <= p
    soft cap (Gemma Team 2024)             score = cap * tanh(score / cap)
    fp8 caches                             K[g, t] = key_scale[g] * cached key, V likewise

The soft cap and the scales have no caller yet; Gemma models and fp8 KV caches will need them.

One call serves prefill chunks and decode steps together (varlen). Sequence s owns the query rows
`cu_seqlens_q[s] : cu_seqlens_q[s + 1]`, the last ones of its `seq_lens[s]` tokens. Slots of its
last block past `seq_lens[s]` may hold stale bytes or NaN, which never affect the result.

A step calls `plan_attention` once, and `paged_attention` in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.attention.torch_cpu import GatherPlan, paged_attention_cpu


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The sequences of a step, for the attention of all its layers. Made by `plan_attention`."""

    #: int32 [num_seqs, max_blocks_per_seq]: block ids of each sequence. Padding is not read.
    block_tables: Tensor
    cu_seqlens_q: Tensor  #: int32 [num_seqs + 1]: prefix sum of query lengths.
    seq_lens: Tensor  #: int32 [num_seqs]: tokens of each sequence, including its queries.
    window: int | None = None  #: Tokens that a query sees, including its own. None: all.
    max_seqlen_q: int | None = None  #: Upper bound of a sequence's queries. None: unknown.
    #: Only for torch on a CPU. fp8 caches have none: the reference computes them there.
    gather: GatherPlan | None = None


def plan_attention(
    key_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    max_seqlen_q: int | None = None,
) -> AttentionPlan:
    """Prepare the attention of a step, once for all layers. Other arguments as in `AttentionPlan`.

    Args:
        key_cache: the cache of any layer. All layers have the same shape, strides and dtype.
        window: at least 1.
        max_seqlen_q: with few queries per sequence (decode), a GPU splits long sequences.

    Raises:
        ValueError: the window is not positive, or the device's implementation does not support the
            cache's strides.
    """
    if window is not None and window < 1:
        raise ValueError(f"the window must be positive, not {window}")
    gather = None
    is_compiled = cpu.OPS is not None and key_cache.dtype in cpu.DTYPES
    if not (key_cache.is_cuda or is_compiled or key_cache.dtype == torch.float8_e4m3fn):
        gather = GatherPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)
    return AttentionPlan(block_tables, cu_seqlens_q, seq_lens, window, max_seqlen_q, gather)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    soft_cap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention with grouped query heads, on the device of `query`.

    On a GPU the call does not wait for the device. Its launches depend only on shapes and host
    values, so a CUDA graph can capture them and replay them with other lengths and block tables.

    Args:
        query: of shape [num_tokens, num_heads, head_dim].
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim], in query's dtype or
            float8_e4m3fn. The last stride is 1. On a CPU the tokens of a block and head are
            contiguous, and the other strides are multiples of their size.
        value_cache: like key_cache, with the same strides.
        plan: result of `plan_attention` for this step.
        scale: positive factor of the scores, usually head_dim ** -0.5.
        soft_cap: positive bound of the scores.
        key_scale: positive float32 of shape [num_kv_heads]. Required for fp8 caches, else None.
        value_scale: like key_scale.
        out: receives the result. Shape and dtype of query, last stride 1.

    Returns:
        Tensor of shape [num_tokens, num_heads, head_dim] in query's dtype. A sequence of length 0
        gets zeros.

    Raises:
        ValueError: the options contradict each other, or the device's implementation does not
            support the strides.
    """
    _check(query, key_cache, scale, soft_cap, key_scale, value_scale)
    if query.is_cuda:
        from baton_kernels.attention.triton_kernel import paged_attention_triton

        return paged_attention_triton(
            query,
            key_cache,
            value_cache,
            plan,
            scale,
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
            out=out,
        )
    if plan.gather is None and key_scale is None:
        assert cpu.OPS is not None
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        sequences = (plan.block_tables, plan.cu_seqlens_q, plan.seq_lens)
        cpu.OPS.paged_attention(
            out, query, key_cache, value_cache, *sequences, scale, plan.window, soft_cap
        )
        return out
    if plan.gather is not None and soft_cap is None:
        attended = paged_attention_cpu(query, key_cache, value_cache, plan.gather, scale)
    else:
        from baton_kernels.attention.reference import paged_attention_reference

        attended = paged_attention_reference(
            query,
            key_cache,
            value_cache,
            plan,
            scale,
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    return attended if out is None else out.copy_(attended)


def _check(
    query: Tensor,
    key_cache: Tensor,
    scale: float,
    soft_cap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Raise ValueError for arguments that no implementation supports. Reads no tensor's values."""
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    if (key_scale is not None, value_scale is not None) != (is_fp8, is_fp8):
        raise ValueError(
            "key_scale and value_scale go with float8_e4m3fn caches, and these are "
            f"{key_cache.dtype}"
        )
    if not is_fp8 and key_cache.dtype != query.dtype:
        raise ValueError(
            f"queries of {query.dtype} need caches of the same dtype or float8_e4m3fn, "
            f"not {key_cache.dtype}"
        )
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key_cache.shape[1]} KV heads evenly"
        )
    if scale <= 0 or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(f"scale and soft_cap must be positive: {scale}, {soft_cap}")
