"""Paged attention on a CPU: gather the blocks, then batched matrix products.

Sequences with one query (decode) are computed together, in groups of similar length so that padding stays under half;
each longer query (a prefill chunk) is one call of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Arguments and result as `baton_kernels.attention.paged_attention`."""
    out = torch.empty_like(query)
    block_size = key_cache.shape[2]
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    decodes: defaultdict[int, list[int]] = defaultdict(list)
    for seq, seq_len in enumerate(lengths):
        rows = slice(starts[seq], starts[seq + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        num_blocks = -(-seq_len // block_size)
        if num_queries == 1:
            decodes[(num_blocks - 1).bit_length()].append(seq)
            continue
        table = block_tables[seq, :num_blocks]
        out[rows] = _attend_chunk(
            query[rows], _gather(key_cache, table)[:, :seq_len], _gather(value_cache, table)[:, :seq_len], scale
        )
    for seqs in decodes.values():
        index = torch.tensor(seqs)
        rows_of = cu_seqlens_q[index].long()
        group_lens = seq_lens[index]
        num_blocks = -(-int(group_lens.max()) // block_size)
        tables = block_tables[index, :num_blocks]
        out[rows_of] = _attend_decodes(query[rows_of], key_cache, value_cache, tables, group_lens, scale)
    return out


def _gather(cache: Tensor, table: Tensor) -> Tensor:
    """[num_blocks, num_kv_heads, block_size, head_dim] -> [num_kv_heads, tokens, head_dim] of one sequence's blocks."""
    return cache[table.long()].transpose(0, 1).flatten(1, 2)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[q, num_heads, head_dim] against [num_kv_heads, t, head_dim]; the queries are the last q of the t tokens."""
    num_queries, num_tokens = query.shape[0], key.shape[1]
    whole = num_queries == num_tokens
    mask = None
    if not whole:
        mask = torch.ones(num_queries, num_tokens, dtype=torch.bool).tril_(num_tokens - num_queries)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[0],
    )
    return attended[0].transpose(0, 1)


def _attend_decodes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """One query per sequence: [s, num_heads, head_dim] with tables [s, blocks] and seq_lens [s]."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_tokens = tables.shape[1] * block_size
    valid_blocks = torch.arange(tables.shape[1]) * block_size < seq_lens[:, None]
    tables = tables.long().masked_fill(~valid_blocks, 0)  # padding may hold anything
    gathered = (num_seqs, num_kv_heads, num_tokens, head_dim)
    key = key_cache[tables].transpose(1, 2).reshape(gathered)
    value = value_cache[tables].transpose(1, 2).reshape(gathered)
    stale = (torch.arange(num_tokens) >= seq_lens[:, None])[:, None, :, None]
    # A weight of 0 does not silence NaN: 0 * NaN is NaN, so stale values must go, not only their scores.
    value = value.masked_fill(stale, 0)
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (grouped @ key.transpose(2, 3)).float() * scale
    scores = scores.masked_fill(stale.transpose(2, 3), float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return (weights @ value).reshape(num_seqs, num_heads, head_dim)
