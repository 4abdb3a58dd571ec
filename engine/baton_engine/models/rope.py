"""Rotary position embedding: the frequencies, as the checkpoint's kind of scaling bends them, and a step's angles.

Kinds: none; linear (Chen et al. 2023); llama3 (Llama 3.1's stretch of low frequencies); YaRN (Peng et al. 2023).
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
    """Of a step's positions, shared by all layers; each float32 [num_tokens, head_dim / 2], see `rotary_angles`."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Positions -> angles. Frequencies are float32 whatever the model's dtype: positions need the digits."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        # No buffer: `.to(dtype)` must not round it. Computed, not loaded: real memory even in a model made on "meta".
        self.inv_freq = inverse_frequencies(config)
        scaling = config.rope_scaling
        self.scale = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0

    def move_to(self, device: torch.device) -> None:
        """Before the first forward there: a graph cannot hold a copy from the host."""
        self.inv_freq = self.inv_freq.to(device)

    def forward(self, positions: Tensor) -> RotaryAngles:
        """Of int64 `positions` [num_tokens]."""
        return RotaryAngles(*rotary_angles(positions, self.inv_freq, self.scale))


def inverse_frequencies(config: CheckpointConfig) -> Tensor:
    """Radians per position of each dimension pair: float32 [head_dim / 2]."""
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
            # By full turns within the original length: many are kept, few stretched, those between interpolated.
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
    """0 for pairs that turn at least beta_fast times within the original length, 1 for at most beta_slow, linear in the pair."""

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
