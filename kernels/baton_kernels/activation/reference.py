"""Gated activations in torch, for tests, CPUs without compiled operations, and torch.compile."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Implement `baton_kernels.activation.silu_and_mul` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
