"""RMSNorm in torch, for tests, CPUs without compiled operations, and torch.compile."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `baton_kernels.norm.rms_norm` in torch."""
    return torch_rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.norm.add_rms_norm` in torch."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total
