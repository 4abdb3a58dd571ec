"""Weights in int8: w[o, i] ~ values[o, i] * scales[o].

They need a quarter of the memory of float32. The compiled product also rounds x to int8, with a
scale for each 32 inputs of a row (`source/int8_linear.h`). That changes the product less than
rounding w does. Sums are in int32 within these 32 inputs and in float32 over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_kernels import cpu

#: Elements of a weight that are widened at a time, where nothing is compiled.
TILE_NUMEL = 1 << 20


class Int8Weight(nn.Module):
    """A weight in symmetric int8 with a scale per output feature, which only `linear` can read.

    Attributes:
        shape: (out_features, in_features).
        data: The values, in [-127, 127]. With compiled operations they are in their order, else
            int8 of the weight's shape.
        scales: float32 of shape [out_features].
    """

    data: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Round a weight of shape [out_features, in_features] and of any dtype."""
        scales = weight.new_empty(len(weight), dtype=torch.float32)
        values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        for rows in _tiles(*weight.shape):
            exact = weight[rows].float()
            largest = exact.abs().amax(dim=1)
            scales[rows] = torch.where(largest == 0, 1.0, largest / 127)  # NaN stays NaN
            values[rows] = (exact / scales[rows, None]).round_().clamp_(-127, 127)
        self._set(values, scales)

    @classmethod
    def from_parts(cls, values: Tensor, scales: Tensor) -> Int8Weight:
        """Return the weight that `parts` took apart."""
        weight = cls.__new__(cls)
        weight._set(values, scales)
        return weight

    def _set(self, values: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.shape = values.shape
        if cpu.OPS is not None and values.is_cpu:
            self.register_buffer("data", cpu.OPS.pack_int8(values))
        else:
            self.register_buffer("data", values)
        self.register_buffer("scales", scales)

    @property
    def is_compiled(self) -> bool:
        """Whether the product is the compiled one."""
        return self.data.dim() > 2

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return the values, int8 of the weight's shape, and the scales."""
        if not self.is_compiled:
            return self.data, self.scales
        num_panels, num_steps, panel, step = self.data.shape
        padded = self.data.transpose(1, 2).reshape(num_panels * panel, num_steps * step)
        values = padded[: self.shape[0], : self.shape[1]]
        if values.dtype is torch.uint8:  # values + 128
            values = (values ^ 128).view(torch.int8)
        return values.contiguous(), self.scales


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Compute `baton_kernels.linear.linear`, with the same arguments and result."""
    y: Tensor
    if weight.is_compiled:
        assert cpu.OPS is not None
        y = cpu.OPS.int8_linear(x, weight.data, weight.scales, bias)
        return y
    tiles = (weight.data[rows].float() for rows in _tiles(*weight.shape))
    y = torch.cat([functional.linear(x.float(), tile) for tile in tiles], dim=-1) * weight.scales
    return (y if bias is None else y + bias).to(x.dtype)


def _tiles(num_rows: int, num_columns: int) -> list[slice]:
    length = max(1, TILE_NUMEL // max(1, num_columns))
    return [slice(start, start + length) for start in range(0, num_rows, length)]
