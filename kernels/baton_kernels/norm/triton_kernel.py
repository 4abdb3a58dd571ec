"""RMSNorm in Triton, with an optional residual. A program normalizes a few rows."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration

#: Longer rows are read twice, in tiles of this number of elements. Shorter rows stay in registers.
MAX_TILE = 8192

#: Configurations that the tuner measures. elements: elements per program. Short rows share a
#: program.
CANDIDATES: list[Configuration] = [
    {"elements": elements, "num_warps": num_warps}
    for elements in (1024, 2048, 4096)
    for num_warps in (2, 4, 8, 16)
]


@functools.cache
def shape_class(num_rows: int, dim: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes.

    With few rows, each row needs more warps to occupy the whole GPU.
    """
    return f"{'few' if num_rows <= 256 else 'many'}/dim={triton.next_power_of_2(dim)}"


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,  # [num_rows, dim]
    total_ptr,  # [num_rows, dim]: residual + x
    x_ptr,  # [num_rows, dim]
    residual_ptr,  # [num_rows, dim]
    weight_ptr,  # [dim]
    eps,
    num_rows,
    dim,
    stride_x_row,
    stride_residual_row,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    ONE_TILE: tl.constexpr,  # dim <= TILE
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, TILE)[None, :]
    mask = (row < num_rows) & (column < dim)
    x = tl.load(x_ptr + row * stride_x_row + column, mask=mask, other=0.0)  # [ROWS, TILE]
    if ADD:
        x += tl.load(residual_ptr + row * stride_residual_row + column, mask=mask, other=0.0)
        tl.store(total_ptr + row * dim + column, x, mask=mask)
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    if not ONE_TILE:
        for start in range(TILE, dim, TILE):
            mask = (row < num_rows) & (start + column < dim)
            more = tl.load(x_ptr + row * stride_x_row + start + column, mask=mask, other=0.0)
            if ADD:
                more += tl.load(
                    residual_ptr + row * stride_residual_row + start + column, mask=mask, other=0.0
                )
                tl.store(total_ptr + row * dim + start + column, more, mask=mask)
            squares += tl.sum(more.to(tl.float32) * more.to(tl.float32), axis=1)
    factor = tl.rsqrt(squares / dim + eps)[:, None]

    # Rounded before the weight is applied, as the reference and Hugging Face do.
    if ONE_TILE:
        weight = tl.load(weight_ptr + column, mask=column < dim, other=0.0)
        normed = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * dim + column, normed * weight, mask=mask)
    else:
        for start in range(0, dim, TILE):
            mask = (row < num_rows) & (start + column < dim)
            weight = tl.load(weight_ptr + start + column, mask=start + column < dim, other=0.0)
            x = tl.load(x_ptr + row * stride_x_row + start + column, mask=mask, other=0.0)
            if ADD:  # add again, because another thread's stored sum may not be visible yet
                x += tl.load(
                    residual_ptr + row * stride_residual_row + start + column, mask=mask, other=0.0
                )
            normed = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * dim + start + column, normed * weight, mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `baton_kernels.norm.rms_norm` in Triton."""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, None, weight, eps)[0].view(x.shape)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.norm.add_rms_norm` in Triton."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    num_rows, dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    if num_rows == 0:
        return out, total
    tile = min(triton.next_power_of_2(dim), MAX_TILE)
    default = {"elements": 2048, "num_warps": min(max(tile // 512, 4), 16)}
    config = configuration("norm", shape_class(num_rows, dim), x.device, default)
    rows = max(config["elements"] // tile, 1) if num_rows > 256 else 1
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        out,
        total,
        x,
        x if residual is None else residual,
        weight,
        eps,
        num_rows,
        dim,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        ROWS=rows,
        TILE=tile,
        ADD=residual is not None,
        ONE_TILE=dim <= tile,
        num_warps=config["num_warps"],
    )
    return out, total
