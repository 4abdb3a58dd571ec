"""Gated activations of MLPs."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.activation.reference import silu_and_mul_reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer 2020): silu(gate) * up, for gate and up concatenated in [..., 2 * dim] -> [..., dim]."""
    return silu_and_mul_reference(gate_up)
