"""Rotary position embedding: scaled frequencies, and the angles of a step's tokens.

The supported scalings are linear (Chen et al. 2023), llama3 (Llama 3.1) and YaRN (Peng et al.
2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton_engine.models.checkpoint.checkpoint_config import (
    CheckpointConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
)
from baton_kernels.rope import rotary_angles


class RotaryAngles(NamedTuple):
    """Cosines and sines of a step's rotary angles, each float32 [num_tokens, head_dim / 2].

    See `baton_kernels.rope.rotary_angles`.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Computes the rotary angles of positions, with float32 frequencies in any model dtype."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        # Not a buffer, so that `.to(dtype)` does not round it. Computed on the CPU even if the
        # model is built on "meta", because no checkpoint holds it.
        self.inv_freq = inverse_frequencies(config)
        scaling = config.rope_scaling
        self.scale = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0

    def move_to(self, device: torch.device) -> None:
        """Move the frequencies to `device`. A captured graph cannot copy them from the host."""
        self.inv_freq = self.inv_freq.to(device)

    def forward(self, positions: Tensor) -> RotaryAngles:
        """Return the angles of int64 `positions` [num_tokens]."""
        return RotaryAngles(*rotary_angles(positions, self.inv_freq, self.scale))


def inverse_frequencies(config: CheckpointConfig) -> Tensor:
    """Return the scaled rotary frequencies in radians per position: float32 [head_dim / 2]."""
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
            # Frequencies with many full turns within the original length are kept. Frequencies with
            # few turns are divided by the factor. Frequencies between are interpolated.
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
    """Return how far YaRN scales each frequency, from 0 (kept) to 1 (divided): [head_dim / 2].

    Frequencies with at least beta_fast turns within the original length are kept. Frequencies with
    at most beta_slow turns are divided by the factor. Between these limits, the result increases
    linearly with the frequency's index. `truncate` moves the limits outwards to whole indices.
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
