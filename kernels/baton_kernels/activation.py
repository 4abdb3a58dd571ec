"""Gated activations of MLPs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer 2020): silu(gate) * up, for gate and up concatenated in [..., 2 * dim] -> [..., dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
