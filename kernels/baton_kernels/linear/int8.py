"""Weights in int8: w[o, i] ~ values[o, i] * scales[o].

Int8 weights need a quarter of the memory of float32 weights. The C++ operation also rounds x to
int8, with a scale for each group of 32 inputs of a row (`source/int8_linear.h`). Rounding x changes
the product less than rounding w. Sums are in int32 within a group, and in float32 over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_kernels import cpu

#: Number of a weight's elements that are processed in float32 at a time.
TILE_NUMEL = 1 << 20


class Int8Weight(nn.Module):
    """A weight in symmetric int8 with a scale per output. Only `linear` can read such a weight.

    Attributes:
        shape: (out_features, in_features).
        data: The values in [-127, 127]. With compiled operations, the values are packed for these
            operations. Otherwise they are int8 of shape `shape`.
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
        """Create a weight from the result of `parts`."""
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
        """Whether the values are packed for the C++ operations."""
        return self.data.dim() > 2

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return (values, scales). The values are int8 of shape `shape`."""
        if not self.is_compiled:
            return self.data, self.scales
        num_panels, num_steps, panel, step = self.data.shape
        padded = self.data.transpose(1, 2).reshape(num_panels * panel, num_steps * step)
        values = padded[: self.shape[0], : self.shape[1]]
        if values.dtype is torch.uint8:  # values + 128
            values = (values ^ 128).view(torch.int8)
        return values.contiguous(), self.scales


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Implement `baton_kernels.linear.linear` for an int8 weight."""
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
