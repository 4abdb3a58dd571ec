"""Experts for many tokens in Triton: grouped GEMMs over aligned tiles, then a sum per token.

    activated[pair] = silu(gate[e] @ x[token]) * (up[e] @ x[token])      one program for gate and up
    rows[pair] = weight[pair] * down[e] @ activated[pair]
    out[token] = sum of the token's rows                     in float32, in the order of its choices

A pair is a token and one of the token's choices of an expert. A tile multiplies BLOCK_M pairs of
one expert by BLOCK_N rows of the expert's weights. Hopper's wgmma needs a first operand of at least
64 rows. With few pairs per expert, only the weights have enough rows, so the product is transposed
(SWAP).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration
from baton_kernels.moe.routing_triton import align_pairs


@triton.jit
def _tile_of_program(program, num_tiles, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (row tile, weight tile) of a program.

    Up to GROUP_M successive programs have the same weight tile, which stays in the L2 cache.
    """
    group = program // (GROUP_M * TILES_N)
    within = program % (GROUP_M * TILES_N)
    group_m = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % group_m, within // group_m


@triton.jit
def _load_rows(row_ptrs, k_start, row_mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = k_start + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (k < K)[None, :]
    return tl.load(row_ptrs[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weights(row_ptrs, k_start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = k_start + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        tile = tl.load(row_ptrs[:, None] + k[None, :])
    else:
        tile = tl.load(row_ptrs[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _multiply(rows, weights, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    activated_ptr,  # [num_pairs, intermediate]
    x_ptr,  # [num_tokens, hidden]
    gate_up_ptr,  # [num_experts, 2 * intermediate, hidden]
    sorted_pairs_ptr,
    tile_experts_ptr,
    num_padded_ptr,
    num_pairs,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # gate rows, and as many up rows
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
):
    TILES_N: tl.constexpr = (INTERMEDIATE + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(num_padded_ptr) // BLOCK_M
    if tl.program_id(0) >= num_tiles * TILES_N:
        return
    tile_m, tile_n = _tile_of_program(tl.program_id(0), num_tiles, TILES_N, GROUP_M)
    pair = tl.load(sorted_pairs_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pair < num_pairs
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * HIDDEN
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns past the end read the last column again and are not stored.
    weight_row = tl.minimum(column, INTERMEDIATE - 1).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile_m).to(tl.int64)
    gate_ptrs = gate_up_ptr + expert * (2 * INTERMEDIATE * HIDDEN) + weight_row * HIDDEN
    up_ptrs = gate_ptrs + INTERMEDIATE * HIDDEN

    if SWAP:
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k_start in range(0, HIDDEN, BLOCK_K):
        x = _load_rows(x_ptrs, k_start, row_mask, HIDDEN, BLOCK_K)
        gate = _multiply(x, _load_weights(gate_ptrs, k_start, HIDDEN, BLOCK_K), gate, SWAP)
        up = _multiply(x, _load_weights(up_ptrs, k_start, HIDDEN, BLOCK_K), up, SWAP)
    activated = (gate / (1 + tl.exp(-gate)) * up).to(activated_ptr.dtype.element_ty)

    target_row = activated_ptr + pair.to(tl.int64) * INTERMEDIATE
    if SWAP:
        mask = (column < INTERMEDIATE)[:, None] & row_mask[None, :]
        tl.store(target_row[None, :] + column[:, None], activated, mask=mask)
    else:
        mask = row_mask[:, None] & (column < INTERMEDIATE)[None, :]
        tl.store(target_row[:, None] + column[None, :], activated, mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    rows_ptr,  # [num_pairs, hidden]
    activated_ptr,  # [num_pairs, intermediate]
    down_ptr,  # [num_experts, hidden, intermediate]
    weights_ptr,  # [num_pairs]
    sorted_pairs_ptr,
    tile_experts_ptr,
    num_padded_ptr,
    num_pairs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
):
    TILES_N: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(num_padded_ptr) // BLOCK_M
    if tl.program_id(0) >= num_tiles * TILES_N:
        return
    tile_m, tile_n = _tile_of_program(tl.program_id(0), num_tiles, TILES_N, GROUP_M)
    pair = tl.load(sorted_pairs_ptr + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pair < num_pairs
    activated_ptrs = activated_ptr + pair.to(tl.int64) * INTERMEDIATE
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, HIDDEN - 1).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile_m).to(tl.int64)
    down_ptrs = down_ptr + expert * (HIDDEN * INTERMEDIATE) + weight_row * INTERMEDIATE

    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k_start in range(0, INTERMEDIATE, BLOCK_K):
        activated = _load_rows(activated_ptrs, k_start, row_mask, INTERMEDIATE, BLOCK_K)
        acc = _multiply(
            activated, _load_weights(down_ptrs, k_start, INTERMEDIATE, BLOCK_K), acc, SWAP
        )

    weight = tl.load(weights_ptr + pair, mask=row_mask, other=0.0).to(tl.float32)
    target_row = rows_ptr + pair.to(tl.int64) * HIDDEN
    if SWAP:
        mask = (column < HIDDEN)[:, None] & row_mask[None, :]
        weighted = (acc * weight[None, :]).to(rows_ptr.dtype.element_ty)
        tl.store(target_row[None, :] + column[:, None], weighted, mask=mask)
    else:
        mask = row_mask[:, None] & (column < HIDDEN)[None, :]
        weighted = (acc * weight[:, None]).to(rows_ptr.dtype.element_ty)
        tl.store(target_row[:, None] + column[None, :], weighted, mask=mask)


@triton.jit
def _combine_kernel(
    out_ptr,  # [num_tokens, hidden]
    rows_ptr,  # [num_pairs, hidden]
    expert_ids_ptr,  # int64 [num_pairs]
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.broadcast_to(tl.load(expert_ids_ptr + pair), [BLOCK_H])
        # The row of an expert of another rank was never written.
        here = (expert >= 0) & (expert < NUM_EXPERTS)
        row = tl.load(rows_ptr + pair * HIDDEN + column, mask=(column < HIDDEN) & here, other=0.0)
        acc += row.to(tl.float32)
    tl.store(
        out_ptr + token * HIDDEN + column, acc.to(out_ptr.dtype.element_ty), mask=column < HIDDEN
    )


def run_experts_gemm(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    config: Configuration,
) -> None:
    """Implement `run_experts_triton` by grouped GEMMs, and write the result into `out`.

    All tensors must be contiguous, and there must be at least one token.
    """
    num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
    num_experts, hidden, intermediate = down.shape
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    aligned = align_pairs(expert_ids, num_experts, block_m)
    max_tiles = len(aligned.tile_experts)
    activated = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
    rows = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    tiles = {"BLOCK_M": block_m, "BLOCK_K": config["BLOCK_K"], "GROUP_M": config["GROUP_M"]}
    launch = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    # Half of a tile's rows are gate rows and half are up rows. So both GEMMs read weight tiles of
    # the same size.
    _gate_up_kernel[(max_tiles * triton.cdiv(intermediate, block_n // 2),)](
        activated,
        x,
        gate_up,
        *aligned,
        num_pairs,
        TOP_K=top_k,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        BLOCK_N=block_n // 2,
        SWAP=bool(config["SWAP"]),
        **tiles,
        **launch,
    )
    _down_kernel[(max_tiles * triton.cdiv(hidden, block_n),)](
        rows,
        activated,
        down,
        weights,
        *aligned,
        num_pairs,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        BLOCK_N=block_n,
        SWAP=bool(config["SWAP"]),
        **tiles,
        **launch,
    )
    block_h = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(len(x), triton.cdiv(hidden, block_h))](
        out,
        rows,
        expert_ids,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        HIDDEN=hidden,
        BLOCK_H=block_h,
        num_warps=max(1, min(4, block_h // 256)),
    )
