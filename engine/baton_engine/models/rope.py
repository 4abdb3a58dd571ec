"""Rotary position embedding: the scaled frequencies and a step's angles.

Scalings: none; linear (Chen et al. 2023); llama3 (of Llama 3.1); YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton_engine.models.checkpoint_config import (
    CheckpointConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
)
from baton_kernels.rope import rotary_angles


class RotaryAngles(NamedTuple):
    """A step's angles, shared by all layers: float32 [num_tokens, head_dim / 2] each.

    See `baton_kernels.rope.rotary_angles`.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Positions -> angles. Frequencies are float32 because other dtypes are not precise enough."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        # Not a buffer, so that `.to(dtype)` does not round it. Computed on the CPU even if the
        # model is built on "meta", because no checkpoint holds it.
        self.inv_freq = inverse_frequencies(config)
        scaling = config.rope_scaling
        self.scale = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0

    def move_to(self, device: torch.device) -> None:
        """Move the frequencies to a device, because a graph cannot contain a copy from the host."""
        self.inv_freq = self.inv_freq.to(device)

    def forward(self, positions: Tensor) -> RotaryAngles:
        """Return the angles of int64 `positions` [num_tokens]."""
        return RotaryAngles(*rotary_angles(positions, self.inv_freq, self.scale))


def inverse_frequencies(config: CheckpointConfig) -> Tensor:
    """Return the radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    )
    inv_freq = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return inv_freq
        case LinearRopeScaling(factor=factor):
            return inv_freq / factor
        case Llama3RopeScaling() as scaling:
            # Frequencies with many full turns within the original length are kept, those with few
            # are divided by the factor, those between are interpolated.
            turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
            keep = (turns - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            keep = keep.clamp(0, 1)
            return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor
        case YarnRopeScaling() as scaling:
            keep = 1 - _yarn_ramp(scaling, config.rope_theta, config.head_dim)
            return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def _yarn_ramp(scaling: YarnRopeScaling, theta: float, head_dim: int) -> Tensor:
    """Return YaRN's ramp over the pairs of dimensions, linear between its ends.

    It is 0 for pairs with at least beta_fast turns within the original length, and 1 for pairs with
    at most beta_slow.
    """

    def pair_that_turns(times: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the step from 0 to 1 must have a slope
    return (
        (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    ).clamp(0, 1)
