"""Gated activations of MLPs.

The implementations are C++ (../cpu/source/elementwise.h), torch (reference.py) and Triton
(triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       gate and up, read, and the result, written
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.activation.reference import silu_and_mul_reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, as in SwiGLU (Shazeer 2020).

    Args:
        gate_up: gate and up concatenated, of shape [..., 2 * dim].

    Returns:
        A tensor of shape [..., dim].
    """
    # Under torch.compile, the reference runs, because it is fused with neighbouring operations.
    if gate_up.is_cuda and not torch.compiler.is_compiling():
        from baton_kernels.activation.triton_kernel import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    if (ops := cpu.ops_for(gate_up)) is not None:
        return ops.silu_and_mul(gate_up)
    return silu_and_mul_reference(gate_up)
