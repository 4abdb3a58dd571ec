"""Paged attention as its formula reads: one sequence, one query and one head at a time, in float64. The truth for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Arguments and result as `baton_kernels.attention.paged_attention`."""
    num_heads = query.shape[1]
    num_kv_heads, block_size = key_cache.shape[1:3]
    out = torch.empty_like(query)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, end = cu_seqlens_q[seq].item(), cu_seqlens_q[seq + 1].item()
        slots = [(int(block_tables[seq, t // block_size]), t % block_size) for t in range(seq_len)]
        for row in range(int(first), int(end)):
            position = seq_len - int(end) + row
            visible = slots[0 if window is None else max(0, position - window + 1) : position + 1]
            for head in range(num_heads):
                group = head // (num_heads // num_kv_heads)
                k = torch.stack([key_cache[block, group, slot] for block, slot in visible]).double()
                v = torch.stack([value_cache[block, group, slot] for block, slot in visible]).double()
                weights = torch.softmax(scale * (k @ query[row, head].double()), dim=0)
                out[row, head] = (weights @ v).to(query.dtype)
    return out
