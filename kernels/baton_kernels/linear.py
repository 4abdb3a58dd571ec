"""Linear layers, on a CPU with weights in the order in which oneDNN multiplies by them.

torch's own `linear` hands float32 to MKL, which reads a row-major weight again and again and takes slower paths on processors
of other makers. A packed weight is reordered once, after loading. The engine's benchmark prints the rates of both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TYPICAL_ROWS = 64
"""Rows of x that the packing is chosen for. Other numbers run at the same speed, unless this is 1."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.

    Args:
        x: of shape [..., in_features].
        weight: of shape [out_features, in_features], perhaps packed.
        bias: of shape [out_features].
    """
    if weight.is_mkldnn:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return functional.linear(x, weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies in the weight's dtype and on its device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of `weight` in oneDNN's order, which only `linear` can read. The weight is one that `can_pack`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed
