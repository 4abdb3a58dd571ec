"""RMSNorm (Zhang and Sennrich 2019), with or without a residual.

    y = x / sqrt(mean(x^2) + eps) * weight

The implementations are C++ (../cpu/source/elementwise.h), torch (reference.py) and Triton
(triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       rows and residuals, read and written
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x over the last dimension. The mean is computed in float32.

    Args:
        x: tensor of shape [..., dim].
        weight: tensor of shape [dim].
        eps: added to the mean square.
    """
    # Under torch.compile, the reference runs, because it is fused with neighbouring operations.
    if x.is_cuda and not torch.compiler.is_compiling():
        from baton_kernels.norm.triton_kernel import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    if (ops := cpu.ops_for(x)) is not None:
        return ops.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual, and normalize the sum.

    Args:
        x: tensor of shape [num_tokens, dim].
        residual: like x.
        weight: tensor of shape [dim].
        eps: added to the mean square.

    Returns:
        rms_norm(residual + x) and residual + x, both like x.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        from baton_kernels.norm.triton_kernel import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    if (ops := cpu.ops_for(x)) is not None:
        return ops.add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)
