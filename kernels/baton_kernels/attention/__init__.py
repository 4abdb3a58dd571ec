"""Paged attention: queries of many sequences against keys and values that lie in fixed-size blocks.

For the query at position p of a sequence, and its query head h in the group of KV head g = h // (num_heads / num_kv_heads):

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

One entry serves prefill chunks and decode steps together (varlen): sequence s owns the query rows
`cu_seqlens_q[s] : cu_seqlens_q[s + 1]`, which are the last ones of its `seq_lens[s]` tokens. Slots of its last block past
`seq_lens[s]` hold stale bytes, NaN perhaps, and never reach the result.
"""

from __future__ import annotations

from torch import Tensor


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention with grouped query heads, by device of `query`.

    Args:
        query: of shape [num_tokens, num_heads, head_dim].
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim]; any strides, the last one 1.
        value_cache: like key_cache, with the same strides.
        block_tables: int32 block ids of each sequence, of shape [num_seqs, max_blocks_per_seq]; padding is not read.
        cu_seqlens_q: int32 prefix sum of query lengths, of shape [num_seqs + 1].
        seq_lens: int32 tokens of each sequence including its queries, of shape [num_seqs].
        scale: multiplies the scores, usually head_dim ** -0.5.

    Returns:
        Of shape [num_tokens, num_heads, head_dim], dtype of query. On a GPU nothing waits for the device.
    """
    if query.is_cuda:
        from baton_kernels.attention.triton_kernel import paged_attention_triton

        return paged_attention_triton(query, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale)
    from baton_kernels.attention.cpu import paged_attention_cpu

    return paged_attention_cpu(query, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale)
