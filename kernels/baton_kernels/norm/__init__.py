"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), alone and after a residual's sum."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension; the mean is taken in float32.

    Args:
        x: of shape [..., dim].
        weight: of shape [dim].
    """
    if (
        x.is_cuda and not torch.compiler.is_compiling()
    ):  # a compiler fuses the reference with what surrounds it
        from baton_kernels.norm.triton_kernel import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    if (ops := cpu.ops_for(x)) is not None:
        return ops.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds what a layer computed to its residual, and normalises the sum for the next layer.

    Args:
        x: of shape [num_tokens, dim].
        residual: like x.
        weight: of shape [dim].

    Returns:
        rms_norm(residual + x) and residual + x, both like x.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        from baton_kernels.norm.triton_kernel import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    if (ops := cpu.ops_for(x)) is not None:
        return ops.add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)
