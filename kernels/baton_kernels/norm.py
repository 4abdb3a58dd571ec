"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension; the mean is taken in float32.

    Args:
        x: of shape [..., dim].
        weight: of shape [dim].
    """
    if x.dtype is torch.float32:
        return torch_rms_norm(x, weight.shape, weight, eps)
    return torch_rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight
