"""Linear layers: y = x W^T + b, summed in float32.

On a CPU, a weight may be packed or quantized. For plain float32 weights, torch calls MKL, which
takes slower paths on processors that are not Intel's. `benchmarks/machine.py` measures the rates of
plain and of packed weights.

    packed      weights reordered for a faster product: C++ (../cpu/source/linear.h) or oneDNN
    quantized   weights in int8 or int4: C++ (../cpu/source/quantized_linear.h) or torch
    reference   both in float64, for tests

For output o and input i, with values in [-127, 127] or [-8, 7]:

    int8        W[o, i] ~ values[o, i] * scales[o]
    int4        W[o, i] ~ values[o, i] * scales[o, i // 32]

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       the weight and the bias, read once, x, read, and y, written
    operations  2 * in_features * out_features per row of x
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baton_kernels.linear.packed import (
    PackedWeight,
    native_instructions,
    packed_linear,
    packing,
)
from baton_kernels.linear.quantized import QuantizedWeight, quantized_linear

__all__ = [
    "PackedWeight",
    "QuantizedWeight",
    "Weight",
    "linear",
    "native_instructions",
    "packing",
]

Weight = Tensor | PackedWeight | QuantizedWeight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return y = x W^T + b.

    Args:
        x: tensor of shape [..., in_features].
        weight: plain, packed or quantized. A plain weight has the shape [out_features,
            in_features].
        bias: tensor of shape [out_features].

    Returns:
        Tensor of shape [..., out_features] in the dtype of x.
    """
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    return functional.linear(x, weight, bias)
