"""Routing in Triton: the experts of each token, and the rows of each tile of the grouped GEMMs.

Each expert gets whole tiles of BLOCK_M rows. A row is a pair (token, choice) with the index
token * top_k + choice. Padding fills the last tile of an expert. The host does not know the number
of tiles. So buffers and grids have the worst-case size, and programs past the end return at once.
The pairs of an expert keep their order, so a repeated step gives the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration

ROUTING_DEFAULT: Configuration = {"ROWS": 1, "num_warps": 1}
#: Configurations that the tuner measures (benchmarks/kernels/tuning). ROWS: tokens per program.
ROUTING_CANDIDATES: list[Configuration] = [
    {"ROWS": rows, "num_warps": warps}
    for rows, warps in ((1, 1), (1, 2), (2, 1), (4, 2), (4, 4), (8, 4))
]


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    weights_ptr,  # [num_tokens, top_k]
    expert_ids_ptr,  # int64 [num_tokens, top_k]
    logits_ptr,  # [num_tokens, num_experts]
    num_tokens,
    stride_logits_token,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens per program
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS_PADDED)
    choices = tl.arange(0, TOP_K_PADDED)
    token_mask = token < num_tokens
    expert_mask = experts < NUM_EXPERTS
    # [ROWS, EXPERTS_PADDED]
    logits = tl.load(
        logits_ptr + token[:, None] * stride_logits_token + experts[None, :],
        mask=token_mask[:, None] & expert_mask[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    # A row past the end is all -inf. The maximum 0 avoids a NaN there.
    largest = tl.where(token_mask, tl.max(logits, axis=1), 0.0)
    shares = tl.exp(logits - largest[:, None])
    total = tl.sum(shares, axis=1)
    # Shares are >= 0. A NaN counts as 0 here to keep ids in range. The total makes the weights NaN.
    left = tl.where(expert_mask[None, :], tl.where(shares == shares, shares, 0.0), -2.0)
    weights = tl.zeros([ROWS, TOP_K_PADDED], dtype=tl.float32)
    chosen = tl.zeros([ROWS, TOP_K_PADDED], dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        share = tl.max(left, axis=1)
        weights = tl.where(choices[None, :] == choice, share[:, None], weights)
        chosen = tl.where(choices[None, :] == choice, best[:, None], chosen)
        left = tl.where(experts[None, :] == best[:, None], -1.0, left)
    if RENORMALIZE:
        total = tl.where(total == total, tl.sum(weights, axis=1), total)
    target = token[:, None] * TOP_K + choices[None, :]
    mask = token_mask[:, None] & (choices[None, :] < TOP_K)
    tl.store(
        weights_ptr + target, (weights / total[:, None]).to(weights_ptr.dtype.element_ty), mask=mask
    )
    tl.store(expert_ids_ptr + target, chosen.to(tl.int64), mask=mask)


@functools.cache
def routing_shape_class(num_experts: int, top_k: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes."""
    return f"routing/experts={num_experts}/top_k={top_k}"


def route_top_k_triton(
    router_logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.moe.route_top_k` in Triton. Among equal logits, lower ids win."""
    num_tokens, num_experts = router_logits.shape
    if router_logits.stride(1) != 1:
        router_logits = router_logits.contiguous()
    weights = torch.empty(num_tokens, top_k, dtype=router_logits.dtype, device=router_logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if num_tokens == 0:
        return weights, expert_ids
    shape_class = routing_shape_class(num_experts, top_k)
    config = configuration("moe", shape_class, router_logits.device, ROUTING_DEFAULT)
    _route_kernel[(triton.cdiv(num_tokens, config["ROWS"]),)](
        weights,
        expert_ids,
        router_logits,
        num_tokens,
        router_logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_PADDED=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        ROWS=config["ROWS"],
        num_warps=config["num_warps"],
    )
    return weights, expert_ids


class AlignedPairs(NamedTuple):
    """Pairs grouped by expert, in tiles of `BLOCK_M` rows for the grouped GEMMs.

    A pair is one token with one of its experts. All pairs of a tile have the same expert.
    """

    #: int32 [max_tiles * BLOCK_M]: pair numbers grouped by expert. Padding rows have the value
    #: num_pairs. Rows past `num_padded` are undefined.
    sorted_pairs: Tensor
    tile_experts: Tensor  #: int32 [max_tiles]: the expert of each tile.
    num_padded: Tensor  #: int32 [1]: number of valid rows, a multiple of BLOCK_M.


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    counts_ptr,  # int32 [num_experts]
    expert_ids_ptr,  # int64 [num_pairs]
    num_pairs,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    matches = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        ids = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=-1)
        matches += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(matches, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    sorted_pairs_ptr,  # int32 [max_tiles * BLOCK_M]
    tile_experts_ptr,  # int32 [max_tiles]
    num_padded_ptr,  # int32 [1]
    counts_ptr,  # int32 [num_experts]
    expert_ids_ptr,  # int64 [num_pairs]
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PADDED)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    num_tiles = tl.sum(tl.where(experts == expert, tiles, 0), axis=0)
    if expert == NUM_EXPERTS - 1:
        tl.store(num_padded_ptr, (first_tile + num_tiles) * BLOCK_M)
    for tile in range(first_tile, first_tile + num_tiles):
        tl.store(tile_experts_ptr + tile, expert)
    position = first_tile * BLOCK_M
    end = position + num_tiles * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        ids = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=-1)
        own = (ids == expert).to(tl.int32)
        tl.store(sorted_pairs_ptr + position + tl.cumsum(own, axis=0) - own, pair, mask=own != 0)
        position += tl.sum(own, axis=0)
    padding = position + tl.arange(0, BLOCK_M)
    tl.store(sorted_pairs_ptr + padding, num_pairs, mask=padding < end)


def max_num_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the largest number of tiles that `align_pairs` can need for `num_pairs` pairs."""
    with_pairs = min(num_pairs, num_experts)
    return (num_pairs + with_pairs * (block_m - 1)) // block_m


def align_pairs(expert_ids: Tensor, num_experts: int, block_m: int) -> AlignedPairs:
    """Group the (token, expert) pairs by expert, and divide the groups into tiles.

    Pairs with an expert id outside [0, num_experts) are in no tile.

    Args:
        expert_ids: int64 of shape [num_tokens, top_k], contiguous, not empty.
        num_experts: number of experts of this rank.
        block_m: number of rows per tile.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    max_tiles = max_num_tiles(num_pairs, num_experts, block_m)
    sorted_pairs = torch.empty(max_tiles * block_m, dtype=torch.int32, device=device)
    tile_experts = torch.empty(max_tiles, dtype=torch.int32, device=device)
    num_padded = torch.empty(1, dtype=torch.int32, device=device)
    # Only two chunk sizes, because each size is compiled when a step first needs it.
    chunk, num_warps = (1024, 4) if num_pairs <= 1024 else (4096, 8)
    _count_kernel[(num_experts,)](counts, expert_ids, num_pairs, CHUNK=chunk, num_warps=num_warps)
    _place_kernel[(num_experts,)](
        sorted_pairs,
        tile_experts,
        num_padded,
        counts,
        expert_ids,
        num_pairs,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        CHUNK=chunk,
        num_warps=num_warps,
    )
    return AlignedPairs(sorted_pairs, tile_experts, num_padded)
