"""RMSNorm in torch. The truth for tests, the CPU's version without a compiler, and what torch.compile fuses."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Arguments and result as `baton_kernels.norm.rms_norm`."""
    return torch_rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Arguments and result as `baton_kernels.norm.add_rms_norm`."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total
