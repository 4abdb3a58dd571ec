"""Rotary position embedding (Su et al. 2021), half-split as in Hugging Face checkpoints.

Dimension pair (i, i + head_dim / 2) of a head at position p turns by the angle p * inv_freq[i]:

    y[i]       = x[i] * cos - x[i + d/2] * sin
    y[i + d/2] = x[i + d/2] * cos + x[i] * sin
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a step's positions, computed in float32 once for all layers.

    Args:
        positions: integers of shape [num_tokens].
        inv_freq: float32 of shape [head_dim / 2].
        scale: multiplies both, and so queries and keys: YaRN's attention factor (Peng et al. 2023, section 3.4).

    Returns:
        cos and sin, each of shape [num_tokens, 1, head_dim] and of `dtype`, for both dimensions of each pair; sin is negative
        for the first.
    """
    angles = positions.float()[:, None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head of `x`, of shape [num_tokens, num_heads, head_dim], by the angles of its token."""
    others = x.roll(x.shape[-1] // 2, dims=-1)  # of each dimension the other one in its pair
    return torch.addcmul(x * cos, others, sin)
