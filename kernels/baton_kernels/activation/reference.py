"""Gated activations in torch. The truth for tests, the CPU's version without a compiler, and what torch.compile fuses."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Arguments and result as `baton_kernels.activation.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
