"""Rotary embedding in torch, for tests, CPUs without compiled operations, and torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.norm.reference import rms_norm_reference


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each token's heads in x [num_tokens, num_heads, head_dim] by the token's angles."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_qk_reference(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.rope.rotate_qk` in torch."""
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
