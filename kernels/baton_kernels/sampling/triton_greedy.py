"""The most likely tokens in Triton, in two launches: the best of each tile, then the best tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.configurations import configuration
from baton_kernels.sampling.triton_kernel import DEFAULT, shape_class


@triton.jit
def _greedy_tiles_kernel(
    best_ptr,  # [rows, num_tiles]
    winner_ptr,  # [rows, num_tiles]
    logits_ptr,  # [rows, vocab_size]
    vocab_size,
    stride_logits_row,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    x = tl.where(x == x, x, float("inf"))  # a NaN counts as not finite
    best = tl.max(x, axis=0)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + to, best)
    tl.store(winner_ptr + to, tl.min(tl.where(x == best, token, vocab_size), axis=0))


@triton.jit
def _greedy_kernel(
    out_ptr,  # [rows]
    best_ptr,  # [rows, num_tiles]
    winner_ptr,  # [rows, num_tiles]
    num_tiles,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    x = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(winner_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
    best = tl.max(x, axis=0)
    winner = tl.min(tl.where(x == best, token, 0x7FFFFFFF), axis=0)
    usual = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(usual, winner, -1).to(tl.int64))


def greedy_triton(logits: Tensor) -> Tensor:
    """Return the most likely token per row, the lowest id among ties.

    Args:
        logits: float32 of shape [rows, vocab_size].

    Returns:
        int64 of shape [rows]; -1 for a row with a NaN or +inf, or with only -inf.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    config = configuration("sampling", shape_class(num_rows, vocab_size), logits.device, DEFAULT)
    num_tiles = triton.cdiv(vocab_size, config["tile"])
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    winner = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    _greedy_tiles_kernel[(num_rows, num_tiles)](
        best,
        winner,
        logits,
        vocab_size,
        logits.stride(0),
        TILE=config["tile"],
        num_warps=config["num_warps"],
    )
    _greedy_kernel[(num_rows,)](
        out, best, winner, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1
    )
    return out
