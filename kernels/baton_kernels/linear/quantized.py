"""Weights in int8 or int4, for a CPU.

- int8: w[o, i] ~ values[o, i] * scales[o], a quarter of the memory of float32.
- int4: w[o, i] ~ values[o, i] * scales[o, i // 32], about a seventh of the memory of float32.

The C++ operation also rounds x to int8, with a scale for each group of 32 inputs of a row
(`source/quantized_linear.h`). Rounding x changes the product less than rounding w. Sums are in
int32 within a group, and in float32 over the groups.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_kernels import cpu

Bits = Literal[8, 4]
#: Number of inputs that share a scale, in an int4 weight and in the rounded x.
GROUP = 32
#: Number of elements of a weight that are processed in float32 at a time.
TILE_NUMEL = 1 << 20
#: int4 scales that are tried for a group, relative to the scale that maps the largest element to
#: -8. A smaller scale clips this element, and rounds all other elements with smaller errors.
INT4_FACTORS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)


class QuantizedWeight(nn.Module):
    """A weight in symmetric int8 or int4. Only `baton_kernels` can read such a weight.

    Attributes:
        shape: (out_features, in_features).
        bits: 8 or 4.
        data: the values, in [-127, 127] for int8 and in [-8, 7] for int4. With compiled operations,
            the values are packed for these operations. Otherwise they are int8 of shape `shape`.
        scales: float32 of shape [out_features] for int8. For int4, bfloat16 of shape [out_features,
            ceil(in_features / 32)]. If the values are packed, the int4 scales are packed too.
    """

    data: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        """Quantize a weight of shape [out_features, in_features], in any dtype, to `bits` bits."""
        super().__init__()
        tiles = [
            _round_to_int8(tile) if bits == 8 else _round_to_int4(tile)
            for tile in weight.split(_tile_rows(weight.shape[1]))
        ]
        self._set(*(torch.cat(parts) for parts in zip(*tiles, strict=True)))

    @classmethod
    def from_parts(cls, values: Tensor, scales: Tensor) -> QuantizedWeight:
        """Create a weight from (values, scales) in the format that `parts` returns."""
        weight = cls.__new__(cls)
        nn.Module.__init__(weight)
        weight._set(values, scales)
        return weight

    def _set(self, values: Tensor, scales: Tensor) -> None:
        self.shape = values.shape
        self.bits: Bits = 8 if scales.dim() == 1 else 4
        if cpu.OPS is not None and values.is_cpu:
            values = cpu.OPS.pack_quantized(values, self.bits)
            if self.bits == 4:
                num_panels, panel = values.shape[0], values.shape[2]
                padded = functional.pad(scales, (0, 0, 0, num_panels * panel - len(scales)))
                scales = padded.view(num_panels, panel, -1).transpose(1, 2).contiguous()
        self.register_buffer("data", values)
        self.register_buffer("scales", scales)

    @property
    def is_compiled(self) -> bool:
        """Whether the values are packed for the C++ operations."""
        return self.data.dim() > 2

    @staticmethod
    def new_parts(shape: torch.Size, bits: Bits) -> tuple[Tensor, Tensor]:
        """Return uninitialized (values, scales), with the shapes and dtypes that `parts` returns.

        Args:
            shape: (out_features, in_features) of the weight.
            bits: 8 or 4.
        """
        values = torch.empty(shape, dtype=torch.int8)
        if bits == 8:
            return values, torch.empty(shape[0], dtype=torch.float32)
        return values, torch.empty(shape[0], -(-shape[1] // GROUP), dtype=torch.bfloat16)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return the unpacked (values, scales). The values are int8 of shape `shape`."""
        if not self.is_compiled:
            return self.data, self.scales
        num_panels, num_steps, panel, step = self.data.shape
        if self.bits == 8:
            padded = self.data.transpose(1, 2).reshape(num_panels * panel, num_steps * step)
            values = padded[: self.shape[0], : self.shape[1]]
            if values.dtype is torch.uint8:  # values + 128
                values = (values ^ 128).view(torch.int8)
            return values.contiguous(), self.scales
        # A byte holds a value of a group's first half and a value of its second half, each plus 8.
        bytes_ = self.data.view(num_panels, -1, 4, panel, step)
        halves = torch.stack((bytes_ & 15, bytes_ >> 4), dim=2)
        padded = halves.permute(0, 4, 1, 2, 3, 5).reshape(num_panels * panel, -1)
        values = padded[: self.shape[0], : self.shape[1]].to(torch.int8) - 8
        scales = self.scales.transpose(1, 2).reshape(num_panels * panel, -1)
        return values.contiguous(), scales[: self.shape[0]].contiguous()


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Implement `baton_kernels.linear.linear` for a quantized weight."""
    y: Tensor
    if weight.is_compiled:
        assert cpu.OPS is not None
        y = cpu.OPS.quantized_linear(x, weight.data, weight.scales, weight.shape[0], bias)
        return y
    num_rows = _tile_rows(weight.shape[1])
    tiles = (
        _dequantize(*tile)
        for tile in zip(weight.data.split(num_rows), weight.scales.split(num_rows), strict=True)
    )
    y = torch.cat([functional.linear(x.float(), tile) for tile in tiles], dim=-1)
    return (y if bias is None else y + bias).to(x.dtype)


def _round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    exact = weight.float()
    largest = exact.abs().amax(dim=1)
    scales = torch.where(largest == 0, 1.0, largest / 127)  # NaN stays NaN
    return (exact / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def _round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `weight` to int4, with a scale for each group of GROUP inputs.

    For each group, a scale is computed from each factor of INT4_FACTORS. The group gets the scale
    with the least sum of squared rounding errors.

    Returns:
        (values, scales), with the values as int8 and the scales as bfloat16.
    """
    num_rows, num_columns = weight.shape
    exact = functional.pad(weight.float(), (0, -num_columns % GROUP)).view(num_rows, -1, GROUP)
    largest = exact.gather(2, exact.abs().argmax(dim=2, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    scales, values = torch.ones_like(largest), torch.zeros_like(exact)
    for factor in INT4_FACTORS:
        # The largest element becomes -8, because int4 has no 8.
        scale = (largest * (factor / -8)).to(torch.bfloat16).float()
        scale = torch.where(scale == 0, 1.0, scale)
        rounded = (exact / scale).round_().clamp_(-8, 7)
        error = (rounded * scale - exact).square_().sum(dim=2, keepdim=True)
        is_better = ~(error >= best)  # true for a NaN
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
        values = torch.where(is_better, rounded, values)
    values = values.nan_to_num_().to(torch.int8).view(num_rows, -1)[:, :num_columns]
    return values.contiguous(), scales.squeeze(2).to(torch.bfloat16)


def _dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weights that quantized values represent, in float32 and of the same shape."""
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    every = scales.float().repeat_interleave(GROUP, dim=1)
    return values.float() * every[:, : values.shape[1]]


def _tile_rows(num_columns: int) -> int:
    return max(1, TILE_NUMEL // max(1, num_columns))
