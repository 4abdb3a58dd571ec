"""RMSNorm in torch, for tests, CPUs without compiled operations, and torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `baton_kernels.norm.rms_norm` in torch."""
    exact = x.float()
    mean_square = exact.square().mean(dim=-1, keepdim=True)
    return (exact * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.norm.add_rms_norm` in torch."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total
