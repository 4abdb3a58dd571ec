"""Experts in Triton: GEMVs for a few tokens, and grouped GEMMs for more tokens.

Constants of a launch:

    BLOCK_M     rows (pairs of a token and an expert) per tile; 1 selects GEMVs
    BLOCK_N     rows of weights per tile; in the first GEMM, half gate rows and half up rows
    BLOCK_K     columns of weights per iteration
    GROUP_M     number of row tiles that share a tile of weights in the L2 cache
    SWAP        1: the product is transposed
    num_warps, num_stages
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration
from baton_kernels.moe.gemm_triton import run_experts_gemm
from baton_kernels.moe.gemv_triton import run_experts_gemv
from baton_kernels.moe.routing_triton import route_top_k_triton

__all__ = [
    "CANDIDATES",
    "default_configuration",
    "route_top_k_triton",
    "run_experts_triton",
    "shape_class",
]

GEMV_TOKENS = 8  #: The default configuration uses GEMVs up to this number of tokens.


def _gemv(block_n: int, block_k: int, num_warps: int) -> Configuration:
    return _gemm(1, block_n, block_k, 1, 0, num_warps, 1)


def _gemm(
    block_m: int,
    block_n: int,
    block_k: int,
    group_m: int,
    swap: int,
    num_warps: int,
    num_stages: int,
) -> Configuration:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group_m,
        "SWAP": swap,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


#: Configurations that the tuner measures, for 16-bit weights. Some need more shared memory than a
#: device has.
CANDIDATES: list[Configuration] = [
    *(
        _gemv(block_n, block_k, num_warps)
        for block_n, block_k, num_warps in (
            (1, 1024, 4),
            (2, 512, 2),
            (2, 1024, 4),
            (4, 256, 2),
            (4, 256, 4),
            (4, 512, 4),
            (4, 1024, 8),
            (8, 256, 4),
            (8, 512, 8),
            (16, 256, 8),
        )
    ),
    *(
        _gemm(block_m, block_n, block_k, 4, 1, 4, num_stages)
        for block_m in (16, 32)
        for block_n, block_k, num_stages in (
            (128, 64, 4),
            (128, 64, 6),
            (128, 128, 3),
            (128, 128, 4),
            (128, 256, 2),
            (256, 64, 4),
            (256, 128, 2),
        )
    ),
    *(
        _gemm(16, block_n, 128, 4, 0, 4, num_stages)
        for block_n, num_stages in ((64, 4), (128, 3), (128, 4))
    ),
    *(
        _gemm(64, block_n, block_k, group_m, swap, num_warps, num_stages)
        for block_n, block_k, swap, num_warps, num_stages in (
            (128, 64, 0, 4, 4),
            (128, 64, 1, 4, 4),
            (128, 128, 0, 4, 3),
            (256, 64, 0, 4, 3),
            (256, 64, 0, 8, 3),
        )
        for group_m in (4, 8)
    ),
    *(
        _gemm(128, block_n, 64, group_m, 0, 8, num_stages)
        for block_n, num_stages in ((128, 4), (256, 3), (256, 4))
        for group_m in (8, 16)
    ),
]


def default_configuration(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> Configuration:
    """Return the launch configuration for devices without measurements.

    Up to GEMV_TOKENS tokens use GEMVs. With more tokens, the number of rows per tile grows with the
    average number of rows per expert.
    """
    halves = dtype.itemsize // 2  # 2 for float32, which needs twice the memory of 16-bit dtypes
    rows_per_expert = num_tokens * top_k / num_experts
    if num_tokens <= GEMV_TOKENS:
        return _gemv(4, 512 // halves, 4)
    if rows_per_expert <= 8:
        return _gemm(16, 128, 128 // halves, 4, 1, 4, 3)
    if rows_per_expert <= 24:
        return _gemm(32, 128, 128 // halves, 4, 1, 4, 3)
    if rows_per_expert <= 96:
        return _gemm(64, 128, 64 // halves, 8, 0, 4, 4)
    return _gemm(128, 256, 64 // halves, 8, 0, 8, 3)


@functools.cache
def shape_class(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes.

    In the key, the number of tokens is rounded up to a power of two, at most 8192.
    """
    tokens = min(8192, triton.next_power_of_2(num_tokens))
    model = f"experts={num_experts}/top_k={top_k}/hidden={hidden}/intermediate={intermediate}"
    return f"{model}/{str(dtype).removeprefix('torch.')}/tokens={tokens}"


def run_experts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
) -> Tensor:
    """Implement `baton_kernels.moe.run_experts` in Triton.

    Raises:
        ValueError: the experts' weights are not contiguous, or shapes do not match.
    """
    num_tokens, top_k = expert_ids.shape
    num_experts, hidden, intermediate = down.shape
    if gate_up.shape != (num_experts, 2 * intermediate, hidden) or x.shape != (num_tokens, hidden):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, gate_up, down, expert_ids))
        raise ValueError(f"shapes of x, gate_up, down and expert ids do not match: {shapes}")
    if not gate_up.is_contiguous() or not down.is_contiguous():
        raise ValueError("the experts' stacked weights must be contiguous")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    config = configuration(
        "moe",
        shape_class(num_tokens, num_experts, top_k, hidden, intermediate, x.dtype),
        x.device,
        default_configuration(num_tokens, num_experts, top_k, x.dtype),
    )
    run = run_experts_gemv if config["BLOCK_M"] == 1 else run_experts_gemm
    run(out, x.contiguous(), gate_up, down, weights.contiguous(), expert_ids.contiguous(), config)
    return out
