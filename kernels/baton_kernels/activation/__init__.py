"""Gated activations of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.activation.reference import silu_and_mul_reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer 2020): silu(gate) * up, for gate and up concatenated in [..., 2 * dim] -> [..., dim]."""
    if (
        gate_up.is_cuda and not torch.compiler.is_compiling()
    ):  # a compiler fuses the reference with what surrounds it
        from baton_kernels.activation.triton_kernel import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    if (ops := cpu.ops_for(gate_up)) is not None:
        return ops.silu_and_mul(gate_up)
    return silu_and_mul_reference(gate_up)
