"""Linear layers in float64, and the rounding of quantized weights and inputs, for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels.linear.quantized import GROUP


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in float64, for a weight of shape [out_features, in_features]."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def dequantize_reference(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weight that quantized values represent, in float32.

    Args:
        values: int8 of shape [out_features, in_features].
        scales: of shape [out_features] for int8, [out_features, num_groups] for int4.
    """
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    return values.float() * scales.float().repeat_interleave(GROUP, 1)[:, : values.shape[1]]


def round_to_int8_reference(x: Tensor) -> Tensor:
    """Round `x` to int8 as the compiled `quantized_linear` does, and return float64 values.

    The result has the values that the int8 numbers represent. Each group of GROUP inputs in a row
    has its own scale.
    """
    groups = functional.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0).div(largest), 0)
    rounded = (groups * inverse).round().double() * (largest / 127).double()
    return rounded.flatten(-2)[..., : x.shape[-1]]
