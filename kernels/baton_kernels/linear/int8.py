"""Weights in int8: w[o, i] ~ values[o, i] * scales[o].

They need a quarter of the memory of float32. Sums are in float32. With few rows, or on a processor
with bfloat16 products, x and the product are rounded to bfloat16. That changes the product less
than rounding w does.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Up to this many rows of x, torch's int8 kernel is not slower than `_by_tiles`. Its time grows
#: with every row. Measured on Zen 5, with and without AVX-512, with a weight of 4096 x 2048.
FEW_ROWS = 16
#: torch's int8 kernel reads a row of x in groups of 16, and past its end if 16 is no divisor.
LANES = 16
#: Elements of a weight that are widened at a time, so that they stay in a core's cache. Twice and
#: half as many ran equally fast.
TILE_NUMEL = 1 << 20


class Int8Weight(nn.Module):
    """A weight in symmetric int8 with a scale per output feature.

    Attributes:
        values: int8 of shape [out_features, in_features], in [-127, 127].
        scales: bfloat16 of shape [out_features].
    """

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scales = weight.new_empty(len(weight), dtype=torch.bfloat16)
        values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        for rows in _tiles(*weight.shape):
            exact = weight[rows].float()
            largest = exact.abs().amax(dim=1)
            scales[rows] = torch.where(largest == 0, 1.0, largest / 127)  # NaN stays NaN
            # Divide by the rounded scales, which the product multiplies with.
            values[rows] = (exact / scales[rows, None].float()).round_().clamp_(-127, 127)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Compute `baton_kernels.linear.linear`, with the same arguments and result."""
    multiply = torch.ops.baton.int8_linear if torch.compiler.is_compiling() else _int8_linear
    y: Tensor = multiply(x, weight.values, weight.scales, bias)
    return y


def native_instructions(dtype: torch.dtype) -> str:
    """Return the CPU's instructions for products in a 16-bit dtype.

    Returns:
        An empty string if the CPU converts to float32 first.
    """
    known = {
        torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),  # the last is Arm's
        torch.float16: ("amx_fp16", "avx512_fp16"),
    }
    capabilities = torch.cpu.get_capabilities()
    return next((name for name in known.get(dtype, ()) if capabilities.get(name)), "")


def _int8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= FEW_ROWS and x.shape[-1] % LANES == 0:
        y = torch.ops.aten._weight_int8pack_mm(rows.bfloat16().contiguous(), values, scales).to(
            x.dtype
        )
        y = y if bias is None else y + bias
    else:
        wide = torch.promote_types(x.dtype, torch.bfloat16)  # unscaled sums may overflow float16
        y, scales = _by_tiles(rows.to(_tile_dtype()), values).to(wide), scales.to(wide)
        y = (y * scales if bias is None else torch.addcmul(bias.to(wide), y, scales)).to(x.dtype)
    return y.view(*x.shape[:-1], len(values))


@torch.library.custom_op("baton::int8_linear", mutates_args=())
def _int8_linear_op(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Hide `_int8_linear` from torch.compile, because its path depends on the number of rows."""
    return _int8_linear(x, values, scales, bias)


@_int8_linear_op.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0]))


@functools.cache
def _tile_dtype() -> torch.dtype:
    return torch.bfloat16 if native_instructions(torch.bfloat16) else torch.float32


def _by_tiles(x: Tensor, values: Tensor) -> Tensor:
    """Compute x values^T in the dtype of x. Tiles of values are widened and stay in the cache."""
    y = x.new_empty(len(x), len(values))
    for rows in _tiles(*values.shape):
        tile = values[rows].to(x.dtype)
        y[:, rows] = functional.linear(x, tile)
    return y


def _tiles(num_rows: int, num_columns: int) -> list[slice]:
    length = max(1, TILE_NUMEL // max(1, num_columns))
    return [slice(start, start + length) for start in range(0, num_rows, length)]
