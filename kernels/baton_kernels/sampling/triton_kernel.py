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
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.configurations import Configuration, configuration
from baton_kernels.sampling.noise import signed
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams
from baton_kernels.sampling.triton_search import (
    LOWEST_KEY,
    Tokens,
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


class _Logits(NamedTuple):
    """Logits [rows, vocab_size] with last stride 1."""

    ptr: Tensor
    vocab_size: int
    stride_row: int


class _Found(NamedTuple):
    """Results of the first kernels, which the last one reads."""

    best_ptr: Tensor  #: float32 [rows]: largest logit.
    bound_ptr: Tensor  #: int32 [rows]: order key of a logit that all top-k tokens reach.
    count_ptr: Tensor  #: int32 [rows]: tokens that reach the bound.
    #: float64 [rows]: sum of the probabilities that min_p keeps. Only for rows with top_p alone.
    total_ptr: Tensor
    gathered_ptr: Tensor  #: float32 [rows, CAPACITY]: logits of the tokens that reach the bound.
    gathered_id_ptr: Tensor  #: int32 [rows, CAPACITY]: their ids.
    #: float64 [rows, num_tiles]: best score. Only for rows without top_k and top_p.
    score_ptr: Tensor
    winner_ptr: Tensor  #: int32 [rows, num_tiles]: its token.


#: Rows of the uploaded table. Their alignment depends on the batch size, which changes per step.
#: They are not in a named tuple, because Triton specializes on every field of a tuple.
_PER_ROW = [
    "rank_ptr",
    "noise_key_ptr",
    "top_k_ptr",
    "temperature_ptr",
    "log_min_p_ptr",
    "top_p_ptr",
]


@triton.jit
def _block_maxima_kernel(
    maxima_ptr,  # [rows, num_blocks]
    logits: _Logits,
    num_blocks,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,  # a multiple of BLOCK_TOKENS
):
    row = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = TILE // BLOCK_TOKENS
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    x = tl.load(
        logits.ptr + row * logits.stride_row + token,
        mask=token < logits.vocab_size,
        other=float("-inf"),
    )
    x = tl.where(x == x, x, float("-inf"))  # a NaN counts as masked
    tl.store(maxima_ptr + row * num_blocks + block, tl.max(x, axis=1), mask=block < num_blocks)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _bounds_kernel(
    found: _Found,
    rank_ptr,  # int64 [rows]: rank of the block maximum that is the bound; 0: no bound
    maxima_ptr,  # [rows, num_blocks]
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
    tl.store(found.best_ptr + row, best)
    tl.store(found.bound_ptr + row, left.to(tl.int32))
    tl.store(found.count_ptr + row, 0)  # the next kernel adds to it
    tl.store(found.total_ptr + row, 0.0)  # the next kernel adds to it


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _collect_kernel(
    found: _Found,
    logits: _Logits,
    noise_key_ptr,  # int64 [rows]
    top_k_ptr,  # int64 [rows]; vocab_size: no top_k
    temperature_ptr,  # float64 [rows]
    log_min_p_ptr,  # float64 [rows]; -inf: no min_p
    top_p_ptr,  # float64 [rows]; inf: no top_p
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits.ptr + row * logits.stride_row + token,
        mask=token < logits.vocab_size,
        other=float("-inf"),
    )
    best = tl.load(found.best_ptr + row).to(tl.float64) / temperature
    scaled = x.to(tl.float64) / temperature
    kept = (x > float("-inf")) & (scaled >= best + tl.load(log_min_p_ptr + row))
    if (top_k >= logits.vocab_size) & (top_p > 1.0):
        noise = gumbel_of(tl.load(noise_key_ptr + row), token)
        score, place = tl.max(
            tl.where(kept, scaled + noise, float("-inf")), axis=0, return_indices=True
        )
        tl.store(found.score_ptr + row * tl.num_programs(1) + tl.program_id(1), score)
        tl.store(
            found.winner_ptr + row * tl.num_programs(1) + tl.program_id(1),
            tl.program_id(1) * TILE + place,
        )
    else:
        if top_k >= logits.vocab_size:  # whole numbers: exact in any order
            tl.atomic_add(
                found.total_ptr + row,
                tl.sum(tl.where(kept, relative_weight(scaled, best), 0.0), axis=0),
            )
        reach = (kept & (order_key(x) >= tl.load(found.bound_ptr + row))).to(tl.int32)
        num_reach = tl.sum(reach, axis=0)
        if num_reach > 0:
            first_slot = tl.atomic_add(found.count_ptr + row, num_reach)
            slot = first_slot + tl.cumsum(reach, axis=0) - reach
            mask = (reach > 0) & (slot < CAPACITY)
            tl.store(found.gathered_ptr + row * CAPACITY + slot, x, mask=mask)
            tl.store(found.gathered_id_ptr + row * CAPACITY + slot, token, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _draw_kernel(
    out_ptr,  # [rows]
    found: _Found,
    logits: _Logits,
    noise_key_ptr,  # int64 [rows]
    top_k_ptr,  # int64 [rows]; vocab_size: no top_k
    temperature_ptr,  # float64 [rows]
    log_min_p_ptr,  # float64 [rows]; -inf: no min_p
    top_p_ptr,  # float64 [rows]; inf: no top_p
    num_tiles,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    winning_score = tl.full([], float("-inf"), tl.float64)
    winner = tl.zeros([], tl.int32)
    if (top_k >= logits.vocab_size) & (top_p > 1.0):
        for start in range(0, num_tiles, TILE):
            tile = start + tl.arange(0, TILE)
            score = tl.load(
                found.score_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")
            )
            token = tl.load(
                found.winner_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0
            )
            top_score = tl.max(score, axis=0)
            if top_score > winning_score:
                winning_score = top_score
                winner = tl.min(tl.where(score == top_score, token, logits.vocab_size), axis=0)
    else:
        temperature = tl.load(temperature_ptr + row)
        best_logit = tl.load(found.best_ptr + row)
        best = best_logit.to(tl.float64) / temperature
        least = best + tl.load(log_min_p_ptr + row)
        noise_key = tl.load(noise_key_ptr + row)
        lowest = order_place(tl.full([], LOWEST_KEY, tl.int32), logits.vocab_size)
        highest = order_place(order_key(best_logit), 0)
        total = tl.load(found.total_ptr + row)
        gathered = tl.load(found.count_ptr + row)
        in_row = tl.zeros([], tl.int32)
        row_ptr = logits.ptr + row * logits.stride_row
        values_ptr = found.gathered_ptr + row * CAPACITY
        ids_ptr = found.gathered_id_ptr + row * CAPACITY
        tokens = Tokens(row_ptr, values_ptr, ids_ptr, in_row, gathered, temperature, best, least)
        enough = gathered <= CAPACITY
        if enough & (top_k >= logits.vocab_size):
            enough = reaching(tokens, lowest, True, TILE) >= top_p * total
        if not enough:
            gathered = tl.zeros([], tl.int32)
            in_row = gathered + logits.vocab_size
        tokens = Tokens(row_ptr, values_ptr, ids_ptr, in_row, gathered, temperature, best, least)

        threshold = lowest
        if top_k < logits.vocab_size:
            wanted = top_k.to(tl.float64)
            if reaching(tokens, lowest, False, TILE) > wanted:
                threshold = search(tokens, lowest, highest, wanted, False, PIVOTS, TILE)
        if top_p <= 1.0:
            if top_k < logits.vocab_size:
                total = reaching(tokens, threshold, True, TILE)
            wanted = tl.maximum(top_p * total, 1.0)  # 1.0: the best token stays even if top_p is 0
            threshold = search(tokens, threshold, highest, wanted, True, PIVOTS, TILE)

        for start in range(0, in_row + gathered, TILE):
            x, token = load_tokens(tokens, start, TILE)
            scaled = x.to(tl.float64) / temperature
            kept = (
                (x > float("-inf"))
                & (scaled >= least)
                & (order_place(order_key(x), token) >= threshold)
            )
            score = tl.where(kept, scaled + gumbel_of(noise_key, token), float("-inf"))
            top_score = tl.max(score, axis=0)
            first = tl.min(tl.where(kept & (score == top_score), token, logits.vocab_size), axis=0)
            if (top_score > winning_score) | ((top_score == winning_score) & (first < winner)):
                winning_score = top_score
                winner = first
    tl.store(out_ptr + row, winner.to(tl.int64))


def draw_tokens_triton(
    logits: Tensor,
    params: Sequence[DrawParams],
    keys: Sequence[int],
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
    config = configuration("sampling", shape_class(num_rows, vocab_size), device, DEFAULT)
    tile, row_tile = config["tile"], config["row_tile"]
    num_blocks, num_tiles = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, tile)

    def empty(*columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *columns, dtype=dtype, device=device)

    maxima = empty(num_blocks, dtype=torch.float32)
    found = _Found(
        best_ptr=empty(dtype=torch.float32),
        bound_ptr=empty(dtype=torch.int32),
        count_ptr=empty(dtype=torch.int32),
        total_ptr=empty(dtype=torch.float64),
        gathered_ptr=empty(CAPACITY, dtype=torch.float32),
        gathered_id_ptr=empty(CAPACITY, dtype=torch.int32),
        score_ptr=empty(num_tiles, dtype=torch.float64),
        winner_ptr=empty(num_tiles, dtype=torch.int32),
    )
    rank, *row_params = _upload(params, keys, vocab_size, device)
    rows = _Logits(logits, vocab_size, logits.stride(0))
    of_tile = {"TILE": tile, "num_warps": config["num_warps"]}
    of_row = {"PIVOTS": PIVOTS, "TILE": row_tile, "num_warps": config["row_warps"]}
    _block_maxima_kernel[(num_rows, num_tiles)](
        maxima, rows, num_blocks, BLOCK_TOKENS=BLOCK, **of_tile
    )
    _bounds_kernel[(num_rows,)](found, rank, maxima, num_blocks, **of_row)
    _collect_kernel[(num_rows, num_tiles)](found, rows, *row_params, CAPACITY=CAPACITY, **of_tile)
    _draw_kernel[(num_rows,)](out, found, rows, *row_params, num_tiles, CAPACITY=CAPACITY, **of_row)
    return out


def _upload(
    params: Sequence[DrawParams], keys: Sequence[int], vocab_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Upload the rows' parameters in one transfer.

    Returns:
        Rank of the bound, noise key and top_k as int64; temperature, log min_p and top_p as
        float64; [rows] each.
    """
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    rank = [
        k if k < vocab_size else TOP_P_RANK if p.top_p < 1 else 0
        for k, p in zip(top_k, params, strict=True)
    ]
    integers = np.array([rank, [signed(key) for key in keys], top_k], dtype=np.int64)
    floats = np.array(
        [
            [max(p.temperature, MIN_TEMPERATURE) for p in params],
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
            [p.top_p if p.top_p < 1 else math.inf for p in params],
        ],
        dtype=np.float64,
    )
    table = torch.from_numpy(np.concatenate((integers, floats.view(np.int64))))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return *table[:3].unbind(), *table[3:].view(torch.float64).unbind()
