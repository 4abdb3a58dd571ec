"""Rotary position embedding (Su et al. 2021), half-split as in Hugging Face checkpoints.

Dimension pair (i, i + head_dim / 2) of a head at position p turns by the angle p * inv_freq[i]:

    y[i]       = x[i] * cos - x[i + d/2] * sin
    y[i + d/2] = x[i + d/2] * cos + x[i] * sin
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a step's positions, computed in float32 once for all layers.

    Args:
        positions: integers of shape [num_tokens].
        inv_freq: float32 of shape [head_dim / 2].

    Returns:
        cos and sin, each of shape [num_tokens, 1, head_dim / 2] and of `dtype`.
    """
    angles = positions.float()[:, None] * inv_freq
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head of `x`, of shape [num_tokens, num_heads, head_dim], by the angles of its token."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
