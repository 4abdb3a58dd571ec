"""Gated activations in Triton. A program computes one tile of a row in float32 and rounds once."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. tile: number of elements per program.
CANDIDATES: list[Configuration] = [
    {"tile": tile, "num_warps": num_warps}
    for tile in (256, 512, 1024, 2048)
    for num_warps in (1, 2, 4, 8)
]


@functools.cache
def shape_class(num_rows: int, dim: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes.

    With few rows, tiles must be smaller to occupy the whole GPU.
    """
    return f"{'few' if num_rows <= 64 else 'many'}/dim={triton.next_power_of_2(dim)}"


@triton.jit
def _silu_and_mul_kernel(
    out_ptr,  # [num_rows, dim]
    gate_up_ptr,  # [num_rows, 2 * dim]
    dim,
    stride_gate_up_row,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < dim
    source = gate_up_ptr + row * stride_gate_up_row + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * dim + column,
        (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """Implement `baton_kernels.activation.silu_and_mul` in Triton."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, dim = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], dim, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    default = {"tile": 512 if num_rows <= 64 else 1024, "num_warps": 4}
    config = configuration("activation", shape_class(num_rows, dim), gate_up.device, default)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(dim, config["tile"]))](
        out, rows, dim, rows.stride(0), TILE=config["tile"], num_warps=config["num_warps"]
    )
    return out
