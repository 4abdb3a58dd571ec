"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), alone and after a residual's sum."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension; the mean is taken in float32.

    Args:
        x: of shape [..., dim].
        weight: of shape [dim].
    """
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
    return add_rms_norm_reference(x, residual, weight, eps)
