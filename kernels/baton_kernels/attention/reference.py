"""Paged attention for tests, as in the formula: one sequence and query at a time, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from baton_kernels.attention import AttentionPlan


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Implement `baton_kernels.attention.paged_attention` in torch, without the parameter `out`.

    The function works on every device, and copies the lengths of the sequences to the host.
    """
    num_kv_heads, block_size = key_cache.shape[1:3]
    window, soft_cap = plan.window, plan.soft_cap
    group = query.shape[1] // num_kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for seq, seq_len in enumerate(plan.seq_lens.tolist()):
        first, end = plan.cu_seqlens_q[seq : seq + 2].tolist()
        # No query attends to a token before `oldest`.
        oldest = 0 if window is None else max(0, seq_len - (end - first) - window + 1)
        positions = torch.arange(oldest, seq_len, device=query.device)
        blocks, slots = (
            plan.block_tables[seq, positions // block_size].long(),
            positions % block_size,
        )
        keys, values = key_cache[blocks, :, slots].double(), value_cache[blocks, :, slots].double()
        if key_scale is not None and value_scale is not None:
            keys, values = (
                keys * key_scale.double()[:, None],
                values * value_scale.double()[:, None],
            )
        for row in range(first, end):
            position = seq_len - end + row
            visible = slice(
                0 if window is None else max(0, position - window + 1 - oldest),
                position + 1 - oldest,
            )
            k = keys[visible].repeat_interleave(group, dim=1)  # [tokens, num_heads, head_dim]
            v = values[visible].repeat_interleave(group, dim=1)
            scores = scale * torch.einsum("hd,thd->ht", query[row].double(), k)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row] = torch.einsum("ht,thd->hd", torch.softmax(scores, dim=1), v).to(query.dtype)
    return out
