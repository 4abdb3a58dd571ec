"""The draw in Triton: four launches per batch, for any parameters, without waiting for the device.

    block maxima    maxima of 64 tokens each                    programs: rows x vocabulary tiles
    bounds          a logit that all top-k tokens reach         programs: rows
    collect         gathers the tokens that reach it, sums      programs: rows x vocabulary tiles
                    probabilities; without top_k and top_p
                    the best score of each tile
    draw            finds the filters' exact thresholds among   programs: rows
                    the gathered tokens, and the winner

A filter's threshold is a place in the order of the tokens: the logit's bits as an ordered integer,
then the bits of the id, lower ids first. There are no ties. The search does not sort: one pass
counts the tokens (or sums the probabilities) that reach each of 16 places, which divides the search
range by 17. If too few or too many tokens were gathered (flat distributions, large k), the passes
read the whole row, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.configurations import Configuration, configuration
from baton_kernels.sampling.noise import signed
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams
from baton_kernels.sampling.triton_search import (
    LOWEST_KEY,
    gumbel_of,
    load_tokens,
    order_key,
    order_place,
    reaching,
    relative_weight,
    search,
)

BLOCK = 64  #: Tokens per block maximum.
PIVOTS = 16  #: Places that one pass over a row counts.
TOP_P_RANK = 1024  #: Rows with top_p alone gather tokens that reach the maximum of this rank.
CAPACITY = 4096  #: Gathered tokens per row.

#: tile and num_warps for programs that read a part of a row; row_tile and row_warps for programs
#: that read a whole row.
CANDIDATES: list[Configuration] = [
    {"tile": tile, "num_warps": num_warps, "row_tile": row_tile, "row_warps": row_warps}
    for tile in (1024, 2048, 4096)
    for num_warps in (4, 8)
    for row_tile, row_warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16))
]
DEFAULT: Configuration = {"tile": 1024, "num_warps": 4, "row_tile": 1024, "row_warps": 8}


def shape_class(num_rows: int, vocab_size: int) -> str:
    """Return the class a launch is tuned for."""
    return f"{'few' if num_rows <= 16 else 'many'}/vocab={triton.next_power_of_2(vocab_size)}"


#: Rows of the uploaded table. Their alignment depends on the batch size, which changes per step.
_PER_ROW = [
    "noise_key_ptr",
    "top_k_ptr",
    "rank_ptr",
    "temperature_ptr",
    "log_min_p_ptr",
    "top_p_ptr",
]


@triton.jit
def _block_maxima_kernel(
    maxima_ptr,  # [rows, num_blocks]
    logits_ptr,  # [rows, vocab_size]
    vocab_size,
    num_blocks,
    stride_logits_row,
    BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    x = tl.where(x == x, x, float("-inf"))  # a NaN counts as masked
    tl.store(maxima_ptr + row * num_blocks + block, tl.max(x, axis=1), mask=block < num_blocks)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _bounds_kernel(
    best_ptr,  # [rows]
    bound_ptr,  # [rows] keys
    count_ptr,  # [rows] zeroed for the next kernel
    total_ptr,  # [rows] zeroed for the next kernel
    maxima_ptr,  # [rows, num_blocks]
    rank_ptr,  # [rows]; 0: no bound
    num_blocks,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.load(rank_ptr + row)
    best = tl.full([], float("-inf"), tl.float32)
    for start in range(0, num_blocks, TILE):
        block = start + tl.arange(0, TILE)
        x = tl.load(
            maxima_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf")
        )
        best = tl.maximum(best, tl.max(x, axis=0))
    left = tl.full([], LOWEST_KEY, tl.int64)
    right = tl.maximum(order_key(best).to(tl.int64), left)
    if (rank == 0) | (rank > num_blocks):
        right = left
    while left < right:  # the largest key that `rank` maxima reach
        step = (right - left + PIVOTS) // (PIVOTS + 1)
        pivots = left + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        reach = tl.zeros([PIVOTS], tl.int32)
        for start in range(0, num_blocks, TILE):
            block = start + tl.arange(0, TILE)
            x = tl.load(
                maxima_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf")
            )
            reach += tl.sum(
                (order_key(x).to(tl.int64)[None, :] >= pivots[:, None]).to(tl.int32), axis=1
            )
        left += tl.sum((reach >= rank).to(tl.int64), axis=0) * step
        right = tl.minimum(right, left + step - 1)
    tl.store(best_ptr + row, best)
    tl.store(bound_ptr + row, left.to(tl.int32))
    tl.store(count_ptr + row, 0)
    tl.store(total_ptr + row, 0.0)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _collect_kernel(
    gathered_ptr,  # [rows, CAPACITY] logits
    gathered_id_ptr,  # [rows, CAPACITY]
    count_ptr,  # [rows] tokens that reach the bound
    total_ptr,  # [rows] probabilities that min_p keeps; of rows with top_p alone
    score_ptr,  # [rows, num_tiles] best score; of rows without top_k and top_p
    winner_ptr,  # [rows, num_tiles]
    logits_ptr,  # [rows, vocab_size]
    best_ptr,  # [rows]
    bound_ptr,  # [rows]
    noise_key_ptr,  # [rows]
    top_k_ptr,  # [rows]
    temperature_ptr,  # [rows]
    log_min_p_ptr,  # [rows]
    top_p_ptr,  # [rows]
    vocab_size,
    stride_logits_row,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    best = tl.load(best_ptr + row).to(tl.float64) / temperature
    scaled = x.to(tl.float64) / temperature
    kept = (x > float("-inf")) & (scaled >= best + tl.load(log_min_p_ptr + row))
    if (top_k >= vocab_size) & (top_p > 1.0):
        noise = gumbel_of(tl.load(noise_key_ptr + row), token)
        score, place = tl.max(
            tl.where(kept, scaled + noise, float("-inf")), axis=0, return_indices=True
        )
        tl.store(score_ptr + row * tl.num_programs(1) + tl.program_id(1), score)
        tl.store(
            winner_ptr + row * tl.num_programs(1) + tl.program_id(1),
            tl.program_id(1) * TILE + place,
        )
    else:
        if top_k >= vocab_size:  # whole numbers: exact in any order
            tl.atomic_add(
                total_ptr + row, tl.sum(tl.where(kept, relative_weight(scaled, best), 0.0), axis=0)
            )
        reach = (kept & (order_key(x) >= tl.load(bound_ptr + row))).to(tl.int32)
        found = tl.sum(reach, axis=0)
        if found > 0:
            slot = tl.atomic_add(count_ptr + row, found) + tl.cumsum(reach, axis=0) - reach
            mask = (reach > 0) & (slot < CAPACITY)
            tl.store(gathered_ptr + row * CAPACITY + slot, x, mask=mask)
            tl.store(gathered_id_ptr + row * CAPACITY + slot, token, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _draw_kernel(
    out_ptr,  # [rows]
    gathered_ptr,  # [rows, CAPACITY]
    gathered_id_ptr,  # [rows, CAPACITY]
    count_ptr,  # [rows]
    total_ptr,  # [rows]
    score_ptr,  # [rows, num_tiles]
    winner_ptr,  # [rows, num_tiles]
    logits_ptr,  # [rows, vocab_size]
    best_ptr,  # [rows]
    noise_key_ptr,  # [rows]
    top_k_ptr,  # [rows]
    temperature_ptr,  # [rows]
    log_min_p_ptr,  # [rows]
    top_p_ptr,  # [rows]
    vocab_size,
    num_tiles,
    stride_logits_row,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    winning_score = tl.full([], float("-inf"), tl.float64)
    winner = tl.zeros([], tl.int32)
    if (top_k >= vocab_size) & (top_p > 1.0):
        for start in range(0, num_tiles, TILE):
            tile = start + tl.arange(0, TILE)
            score = tl.load(
                score_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")
            )
            token = tl.load(winner_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0)
            top_score = tl.max(score, axis=0)
            if top_score > winning_score:
                winning_score = top_score
                winner = tl.min(tl.where(score == top_score, token, vocab_size), axis=0)
    else:
        temperature = tl.load(temperature_ptr + row)
        best_logit = tl.load(best_ptr + row)
        best = best_logit.to(tl.float64) / temperature
        least = best + tl.load(log_min_p_ptr + row)
        noise_key = tl.load(noise_key_ptr + row)
        row_ptr = logits_ptr + row * stride_logits_row
        values_ptr = gathered_ptr + row * CAPACITY
        ids_ptr = gathered_id_ptr + row * CAPACITY

        lowest = order_place(tl.full([], LOWEST_KEY, tl.int32), vocab_size)
        highest = order_place(order_key(best_logit), 0)
        total = tl.load(total_ptr + row)
        gathered = tl.load(count_ptr + row)
        in_row = tl.zeros([], tl.int32)
        enough = gathered <= CAPACITY
        if enough & (top_k >= vocab_size):
            mass = reaching(
                row_ptr,
                values_ptr,
                ids_ptr,
                in_row,
                gathered,
                temperature,
                best,
                least,
                lowest,
                True,
                TILE,
            )
            enough = mass >= top_p * total
        if not enough:
            gathered = tl.zeros([], tl.int32)
            in_row = gathered + vocab_size

        threshold = lowest
        if top_k < vocab_size:
            wanted = top_k.to(tl.float64)
            mass = reaching(
                row_ptr,
                values_ptr,
                ids_ptr,
                in_row,
                gathered,
                temperature,
                best,
                least,
                lowest,
                False,
                TILE,
            )
            if mass > wanted:
                threshold = search(
                    row_ptr,
                    values_ptr,
                    ids_ptr,
                    in_row,
                    gathered,
                    temperature,
                    best,
                    least,
                    lowest,
                    highest,
                    wanted,
                    False,
                    PIVOTS,
                    TILE,
                )
        if top_p <= 1.0:
            if top_k < vocab_size:
                total = reaching(
                    row_ptr,
                    values_ptr,
                    ids_ptr,
                    in_row,
                    gathered,
                    temperature,
                    best,
                    least,
                    threshold,
                    True,
                    TILE,
                )
            threshold = search(
                row_ptr,
                values_ptr,
                ids_ptr,
                in_row,
                gathered,
                temperature,
                best,
                least,
                threshold,
                highest,
                # 1.0: the best token stays even if top_p is 0.
                tl.maximum(top_p * total, 1.0),
                True,
                PIVOTS,
                TILE,
            )

        for start in range(0, in_row + gathered, TILE):
            x, token = load_tokens(row_ptr, values_ptr, ids_ptr, start, in_row, gathered, TILE)
            scaled = x.to(tl.float64) / temperature
            kept = (
                (x > float("-inf"))
                & (scaled >= least)
                & (order_place(order_key(x), token) >= threshold)
            )
            score = tl.where(kept, scaled + gumbel_of(noise_key, token), float("-inf"))
            top_score = tl.max(score, axis=0)
            first = tl.min(tl.where(kept & (score == top_score), token, vocab_size), axis=0)
            if (top_score > winning_score) | ((top_score == winning_score) & (first < winner)):
                winning_score = top_score
                winner = first
    tl.store(out_ptr + row, winner.to(tl.int64))


def draw_tokens_triton(
    logits: Tensor,
    params: Sequence[DrawParams],
    keys: Sequence[int],
    config: Configuration | None = None,
) -> Tensor:
    """Compute `baton_kernels.sampling.draw_tokens`. A NaN counts as -inf.

    Raises:
        ValueError: the vocabulary has 2**24 tokens or more.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size >= 2**24:
        raise ValueError(
            f"vocabularies of 2**24 tokens and more cannot be sampled; this one has {vocab_size}"
        )
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    config = config or configuration("sampling", shape_class(num_rows, vocab_size), device, DEFAULT)
    noise_keys, top_k, rank, temperature, log_min_p, top_p = _upload(
        params, keys, vocab_size, device
    )
    tile, row_tile = config["tile"], config["row_tile"]
    num_blocks, num_tiles = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, tile)

    def empty(*columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *columns, dtype=dtype, device=device)

    maxima = empty(num_blocks, dtype=torch.float32)
    best, bound = empty(dtype=torch.float32), empty(dtype=torch.int32)
    count, total = empty(dtype=torch.int32), empty(dtype=torch.float64)
    gathered, gathered_ids = (
        empty(CAPACITY, dtype=torch.float32),
        empty(CAPACITY, dtype=torch.int32),
    )
    scores, winners = empty(num_tiles, dtype=torch.float64), empty(num_tiles, dtype=torch.int32)

    _block_maxima_kernel[(num_rows, num_tiles)](
        maxima,
        logits,
        vocab_size,
        num_blocks,
        logits.stride(0),
        BLOCKS=tile // BLOCK,
        BLOCK_TOKENS=BLOCK,
        num_warps=config["num_warps"],
    )
    _bounds_kernel[(num_rows,)](
        best,
        bound,
        count,
        total,
        maxima,
        rank,
        num_blocks,
        PIVOTS=PIVOTS,
        TILE=row_tile,
        num_warps=config["row_warps"],
    )
    row_params = (noise_keys, top_k, temperature, log_min_p, top_p, vocab_size)
    found = (gathered, gathered_ids, count, total, scores, winners, logits, best)
    _collect_kernel[(num_rows, num_tiles)](
        *found,
        bound,
        *row_params,
        logits.stride(0),
        TILE=tile,
        CAPACITY=CAPACITY,
        num_warps=config["num_warps"],
    )
    _draw_kernel[(num_rows,)](
        out,
        *found,
        *row_params,
        num_tiles,
        logits.stride(0),
        PIVOTS=PIVOTS,
        TILE=row_tile,
        CAPACITY=CAPACITY,
        num_warps=config["row_warps"],
    )
    return out


def _upload(
    params: Sequence[DrawParams], keys: Sequence[int], vocab_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Upload the rows' parameters in one transfer.

    Returns:
        Noise key, top_k and rank of the bound as int64; temperature, log min_p and top_p as
        float64; [rows] each.
    """
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    rank = [
        k if k < vocab_size else TOP_P_RANK if p.top_p < 1 else 0
        for k, p in zip(top_k, params, strict=True)
    ]
    integers = torch.tensor([[signed(key) for key in keys], top_k, rank], dtype=torch.int64)
    floats = torch.tensor(
        [
            [max(p.temperature, MIN_TEMPERATURE) for p in params],
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
            [p.top_p if p.top_p < 1 else math.inf for p in params],
        ],
        dtype=torch.float64,
    )
    table = torch.cat((integers, floats.view(torch.int64)))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return *table[:3].unbind(), *table[3:].view(torch.float64).unbind()
