"""Linear layers: y = x W^T + b, summed in float32.

On a CPU a weight may be packed or quantized to int8. For plain float32 weights, torch calls MKL,
which takes slower paths on processors that are not Intel's. The engine's benchmark prints the rates
of plain and of packed weights.

    packed      weights reordered for a faster product
    int8        weights in int8 with a scale per output
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baton_kernels.linear.int8 import Int8Weight, int8_linear
from baton_kernels.linear.packed import (
    PackedWeight,
    native_instructions,
    packed_linear,
    packing,
)

__all__ = ["Int8Weight", "PackedWeight", "Weight", "linear", "native_instructions", "packing"]

Weight = Tensor | PackedWeight | Int8Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return y = x W^T + b.

    Args:
        x: tensor of shape [..., in_features].
        weight: plain, packed or int8; plain weights have the shape [out_features, in_features].
        bias: tensor of shape [out_features].

    Returns:
        Tensor of shape [..., out_features] in the dtype of x.
    """
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight, bias)
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, bias)
    return functional.linear(x, weight, bias)
