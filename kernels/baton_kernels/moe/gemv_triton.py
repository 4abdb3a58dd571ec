"""Experts for a few tokens in Triton: GEMVs, without sorting or padding.

    activated[pair] = silu(gate[e] @ x[token]) * (up[e] @ x[token])    per (pair, BLOCK_N columns)
    out[token] = sum of weight * down[e] @ activated[pair]             per (token, BLOCK_N columns)

Each pair (token, choice) reads the weights of one expert. Products are computed in float32 without
tensor cores, because reading the weights for one row takes longer than the products. Threads join
their partial sums only after the loop, so that an iteration needs no exchange between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration


@triton.jit
def _gate_up_row_kernel(
    activated_ptr,  # [num_pairs, intermediate]
    x_ptr,  # [num_tokens, hidden]
    gate_up_ptr,  # [num_experts, 2 * intermediate, hidden]
    expert_ids_ptr,  # int64 [num_pairs]
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ids_ptr + pair)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns past the end read the last column again and are not stored.
    weight_row = tl.minimum(column, INTERMEDIATE - 1).to(tl.int64)
    gate_ptrs = gate_up_ptr + expert * (2 * INTERMEDIATE * HIDDEN) + weight_row * HIDDEN
    up_ptrs = gate_ptrs + INTERMEDIATE * HIDDEN
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # Each row reads x from the cache, which avoids an exchange between threads.
    x_ptrs = x_ptr + (pair // TOP_K) * HIDDEN + tl.zeros([BLOCK_N, 1], dtype=tl.int64)
    for k_start in range(0, HIDDEN, BLOCK_K):
        k = k_start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptrs + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        gate += tl.load(gate_ptrs[:, None] + k, mask=k < HIDDEN, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptrs[:, None] + k, mask=k < HIDDEN, other=0.0).to(tl.float32) * x
    gate_sum = tl.sum(gate, axis=1)
    activated = gate_sum / (1 + tl.exp(-gate_sum)) * tl.sum(up, axis=1)
    target = activated_ptr + pair * INTERMEDIATE + column
    tl.store(target, activated.to(activated_ptr.dtype.element_ty), mask=column < INTERMEDIATE)


@triton.jit
def _down_row_kernel(
    out_ptr,  # [num_tokens, hidden]
    activated_ptr,  # [num_pairs, intermediate]
    down_ptr,  # [num_experts, hidden, intermediate]
    weights_ptr,  # [num_pairs]
    expert_ids_ptr,  # int64 [num_pairs]
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,  # choices at a time
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, HIDDEN - 1).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for choice in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        pair = token * TOP_K + choice
        expert = tl.load(expert_ids_ptr + pair)
        # Masked rather than skipped, so that the loads of several choices overlap.
        experts = tl.broadcast_to(expert, [1, BLOCK_K])
        here = (experts >= 0) & (experts < NUM_EXPERTS)
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        down_ptrs = down_ptr + expert * (HIDDEN * INTERMEDIATE) + weight_row * INTERMEDIATE
        activated_ptrs = (
            activated_ptr + pair * INTERMEDIATE + tl.zeros([BLOCK_N, 1], dtype=tl.int64)
        )
        product = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for k_start in range(0, INTERMEDIATE, BLOCK_K):
            k = k_start + tl.arange(0, BLOCK_K)[None, :]
            mask = (k < INTERMEDIATE) & here
            activated = tl.load(activated_ptrs + k, mask=mask, other=0.0).to(tl.float32)
            product += (
                tl.load(down_ptrs[:, None] + k, mask=mask, other=0.0).to(tl.float32) * activated
            )
        acc += product * tl.where((expert >= 0) & (expert < NUM_EXPERTS), weight, 0.0)
    target = out_ptr + token * HIDDEN + column
    tl.store(target, tl.sum(acc, axis=1).to(out_ptr.dtype.element_ty), mask=column < HIDDEN)


def run_experts_gemv(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    config: Configuration,
) -> None:
    """Implement `run_experts_triton` by GEMVs, and write the result into `out`.

    All tensors must be contiguous, and there must be at least one token.
    """
    num_tokens, top_k = expert_ids.shape
    num_experts, hidden, intermediate = down.shape
    block_n = config["BLOCK_N"]
    activated = torch.empty(num_tokens * top_k, intermediate, dtype=x.dtype, device=x.device)
    shapes = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
    }
    tiles = {"BLOCK_N": block_n, "BLOCK_K": config["BLOCK_K"]}
    # Pairs vary fastest, so that the pairs of an expert share one read of its weights from memory.
    _gate_up_row_kernel[(num_tokens * top_k, triton.cdiv(intermediate, block_n))](
        activated, x, gate_up, expert_ids, **shapes, **tiles, num_warps=config["num_warps"]
    )
    _down_row_kernel[(num_tokens, triton.cdiv(hidden, block_n))](
        out,
        activated,
        down,
        weights,
        expert_ids,
        **shapes,
        **tiles,
        UNROLL=2,
        num_warps=config["num_warps"],
    )
