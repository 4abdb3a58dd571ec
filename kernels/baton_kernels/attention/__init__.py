"""Paged attention: queries of many sequences against keys and values that lie in fixed-size blocks.

For the query at position p of a sequence, and its query head h in the group of KV head g = h // (num_heads / num_kv_heads):

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

With a sliding window (Beltagy et al. 2020) the sum is over p - window < t <= p.

One entry serves prefill chunks and decode steps together (varlen): sequence s owns the query rows
`cu_seqlens_q[s] : cu_seqlens_q[s + 1]`, which are the last ones of its `seq_lens[s]` tokens. Slots of its last block past
`seq_lens[s]` hold stale bytes, NaN perhaps, and never reach the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from baton_kernels.attention.cpu import AttentionPlan


def plan_attention(
    key_cache: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, window: int | None = None
) -> AttentionPlan | None:
    """Computes once what the layers of a step have in common. Arguments as of `paged_attention`.

    Args:
        key_cache: of any layer: the others' have the same shape and strides.

    Returns:
        None on a GPU, where there is nothing to prepare.

    Raises:
        ValueError: if the cache's strides are not what the device's implementation addresses.
    """
    if key_cache.is_cuda:
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
) -> Tensor:
    """Causal attention with grouped query heads, by device of `query`.

    Args:
        query: of shape [num_tokens, num_heads, head_dim].
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim]; any strides, the last one 1. On a CPU the tokens of a
            block and head lie one after the other, and the other strides are multiples of their size.
        value_cache: like key_cache, with the same strides.
        block_tables: int32 block ids of each sequence, of shape [num_seqs, max_blocks_per_seq]; padding is not read.
        cu_seqlens_q: int32 prefix sum of query lengths, of shape [num_seqs + 1].
        seq_lens: int32 tokens of each sequence including its queries, of shape [num_seqs].
        scale: multiplies the scores, usually head_dim ** -0.5.
        window: each query sees at most so many tokens, itself included; at least 1. None: all.
        plan: what `plan_attention` made of the same arguments; None: it is made now.

    Returns:
        Of shape [num_tokens, num_heads, head_dim], dtype of query. On a GPU nothing waits for the device.
    """
    if query.is_cuda:
        from baton_kernels.attention.triton_kernel import paged_attention_triton

        return paged_attention_triton(
            query, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, window
        )
    from baton_kernels.attention.cpu import AttentionPlan, paged_attention_cpu

    plan = plan or AttentionPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)
    return paged_attention_cpu(query, key_cache, value_cache, plan, scale)
