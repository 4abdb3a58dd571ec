"""Draws tokens in Triton, for any parameters, without waiting for the device.

A batch has four launches, or only the last two if no row has a filter:

    block maxima    maxima of 64 tokens each                    programs: rows x vocabulary tiles
    bounds          a lower bound of the logits that the        programs: rows
                    filters probably keep
    collect         gathers the tokens that reach the bound     programs: rows x vocabulary tiles
                    and sums probabilities. Without top_k and
                    top_p: finds the best score of each tile
    draw            finds the exact thresholds of the filters   programs: rows
                    among the gathered tokens, and the token
                    with the best score

Tokens are ordered by logit, and tokens of equal logits by id, so there are no ties
(triton_search.py). A filter keeps the tokens whose keys reach a threshold. The threshold is found
without sorting. Each pass counts the tokens (or sums the probabilities) that reach each of 16 keys,
which divides the search range by 17. If too few or too many tokens were gathered (flat
distributions, large k), the passes read the whole row, with the same result.

The launches share one tensor `state`, int64 of shape [rows, width]. A row has a header of
_FIRST_SLOT numbers, followed by slots. At first, the slots contain block maxima. `collect` replaces
the maxima by the gathered tokens, or by the score and token of each tile's winner.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams
from baton_kernels.sampling.triton_search import (
    LOWEST,
    MASKED,
    Tokens,
    gumbel_of,
    highest_of_logit,
    load_token_keys,
    logit_key,
    logit_of,
    lowest_of_logit,
    reaching,
    relative_weight,
    search,
    token_key,
    token_of,
)

BLOCK = 64  #: Tokens per block maximum.
PIVOTS = 16  #: Token keys with which one pass compares the tokens of a row.
#: Share of the block maxima that must reach the bound, in rows with top_p but without top_k. Tokens
#: that reach the bound are gathered. If logits have a normal distribution, that is 5% of the
#: vocabulary. If a few tokens are much more likely than all others, it is less.
TOP_P_BLOCKS = 31 / 32
CAPACITY = 16384  #: Maximum number of gathered tokens per row.

#: Configurations that the tuner measures. tile and num_warps are for programs that read a part of a
#: row, row_tile and row_warps for programs that read a whole row.
CANDIDATES: list[Configuration] = [
    {"tile": tile, "num_warps": num_warps, "row_tile": row_tile, "row_warps": row_warps}
    for tile in (1024, 2048, 4096)
    for num_warps in (4, 8)
    for row_tile, row_warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16))
]
DEFAULT: Configuration = {"tile": 1024, "num_warps": 4, "row_tile": 1024, "row_warps": 8}


@functools.cache
def shape_class(num_rows: int, vocab_size: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes."""
    return f"{'few' if num_rows <= 16 else 'many'}/vocab={triton.next_power_of_2(vocab_size)}"


# Header of a row's state. Only rows with top_p and without top_k have the two sums. The sums add
# the probabilities of tokens that min_p keeps.
_HIGHEST = tl.constexpr(0)  # highest token key with the largest logit
_BOUND = tl.constexpr(1)  # lowest token key to gather
_COUNT = tl.constexpr(2)  # tokens that reach the bound
_TOTAL = tl.constexpr(3)  # sum over the row
_GATHERED = tl.constexpr(4)  # sum over the tokens that reach the bound
_FIRST_SLOT = tl.constexpr(16)  # a multiple of 16 keeps the rows aligned


class _Params(NamedTuple):
    """Sampling parameters of a row, in the order in which `_upload` stores them."""

    rank: tl.tensor  #: int64: number of block maxima that reach the bound; vocab_size: no bound.
    noise_key: tl.tensor  #: int64.
    top_k: tl.tensor  #: int64; vocab_size: no top_k.
    temperature: tl.tensor  #: float64.
    log_min_p: tl.tensor  #: float64; -inf: no min_p.
    top_p: tl.tensor  #: float64; 2: no top_p.


@triton.jit
def _load_params(params_ptr, row):
    at = params_ptr + row * 6
    return _Params(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3).to(tl.float64, bitcast=True),
        tl.load(at + 4).to(tl.float64, bitcast=True),
        tl.load(at + 5).to(tl.float64, bitcast=True),
    )


@triton.jit
def _block_maxima_kernel(
    state_ptr,  # [rows, width]
    logits_ptr,  # [rows, vocab_size]
    width,
    vocab_size,
    stride_logits_row,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,  # a multiple of BLOCK_TOKENS
):
    row = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = TILE // BLOCK_TOKENS
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    tl.store(
        state_ptr + row * width + _FIRST_SLOT + block,
        token_key(tl.max(logit_key(x), axis=1), block),
        mask=block < tl.cdiv(vocab_size, BLOCK_TOKENS),
    )


@triton.jit
def _bounds_kernel(
    state_ptr,  # [rows, width]
    params_ptr,  # [rows, 6]
    logits_ptr,  # [rows, vocab_size]
    width,
    vocab_size,
    BLOCK_TOKENS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    params = _load_params(params_ptr, row)
    state = state_ptr + row * width
    num_blocks = tl.cdiv(vocab_size, BLOCK_TOKENS)
    highest = tl.full([], MASKED, tl.int64)
    for start in range(0, num_blocks, TILE):
        block = start + tl.arange(0, TILE)
        key = tl.load(state + _FIRST_SLOT + block, mask=block < num_blocks, other=MASKED)
        highest = tl.maximum(highest, highest_of_logit(tl.max(key, axis=0)))
    best = logit_of(highest).to(tl.float64) / params.temperature
    lowest = tl.full([], LOWEST, tl.int64)
    none = tl.zeros([], tl.int32)
    maxima = Tokens(
        logits_ptr,
        state + _FIRST_SLOT,
        none,
        none + num_blocks,
        params.temperature,
        best,
        float("-inf"),
    )
    count, rank = num_blocks.to(tl.float64), params.rank.to(tl.float64)
    bound = search(maxima, lowest, highest, count, rank, False, PIVOTS, TILE)
    if (params.top_k >= vocab_size) & (params.top_p <= 1.0):
        # The tokens below x have less than 1 - top_p of the best token's probability.
        x = (best + tl.log((1.0 - params.top_p) / vocab_size)) * params.temperature
        bound = tl.maximum(bound, tl.minimum(token_key(logit_key(x.to(tl.float32)), 0), highest))
    tl.store(state + _HIGHEST, highest)
    tl.store(state + _BOUND, lowest_of_logit(bound))
    for counter in tl.static_range(_COUNT, _GATHERED + 1):
        tl.store(state + counter, 0)  # the collect kernel adds to the counters


@triton.jit
def _collect_kernel(
    state_ptr,  # [rows, width]
    params_ptr,  # [rows, 6]
    logits_ptr,  # [rows, vocab_size]
    width,
    vocab_size,
    stride_logits_row,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    params = _load_params(params_ptr, row)
    state = state_ptr + row * width
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    best = logit_of(tl.load(state + _HIGHEST)).to(tl.float64) / params.temperature
    if (params.top_k >= vocab_size) & (params.top_p > 1.0):
        scaled = x.to(tl.float64) / params.temperature
        kept = x > float("-inf")
        if params.log_min_p > float("-inf"):  # batches without filters have no `best`
            kept &= scaled >= best + params.log_min_p
        noise = gumbel_of(params.noise_key, token)
        score, index = tl.max(
            tl.where(kept, scaled + noise, float("-inf")), axis=0, return_indices=True
        )
        slot = state + _FIRST_SLOT + 2 * tl.program_id(1)
        tl.store(slot, score.to(tl.int64, bitcast=True))
        tl.store(slot + 1, (tl.program_id(1) * TILE + index).to(tl.int64))
    else:
        key = token_key(logit_key(x), token)
        reaches = key >= tl.load(state + _BOUND)
        if params.top_k >= vocab_size:
            scaled = x.to(tl.float64) / params.temperature
            kept = (x > float("-inf")) & (scaled >= best + params.log_min_p)
            weight = tl.where(kept, relative_weight(scaled, best), 0.0)
            gathered = tl.sum(tl.where(reaches, weight, 0.0), axis=0)
            # Sums of integers are exact, in any order of the programs.
            tl.atomic_add(state + _TOTAL, tl.sum(weight, axis=0).to(tl.int64))
            tl.atomic_add(state + _GATHERED, gathered.to(tl.int64))
            reaches &= kept
        reach = reaches.to(tl.int32)
        num_reach = tl.sum(reach, axis=0)
        if num_reach > 0:
            first_slot = tl.atomic_add(state + _COUNT, num_reach.to(tl.int64)).to(tl.int32)
            slot = first_slot + tl.cumsum(reach, axis=0) - reach
            tl.store(state + _FIRST_SLOT + slot, key, mask=reaches & (slot < CAPACITY))


@triton.jit
def _draw_kernel(
    out_ptr,  # [rows]
    state_ptr,  # [rows, width]
    params_ptr,  # [rows, 6]
    logits_ptr,  # [rows, vocab_size]
    width,
    vocab_size,
    stride_logits_row,
    num_tiles,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    params = _load_params(params_ptr, row)
    state = state_ptr + row * width
    winning_score = tl.full([], float("-inf"), tl.float64)
    winner = tl.zeros([], tl.int32)
    if (params.top_k >= vocab_size) & (params.top_p > 1.0):
        for start in range(0, num_tiles, TILE):
            tile = start + tl.arange(0, TILE)
            slot, mask = state + _FIRST_SLOT + 2 * tile, tile < num_tiles
            score = tl.load(slot, mask=mask, other=0).to(tl.float64, bitcast=True)
            score = tl.where(mask, score, float("-inf"))
            token = tl.load(slot + 1, mask=mask, other=0).to(tl.int32)
            top_score = tl.max(score, axis=0)
            if top_score > winning_score:
                winning_score = top_score
                winner = tl.min(tl.where(score == top_score, token, vocab_size), axis=0)
    else:
        left = tl.load(state + _BOUND)
        right = tl.load(state + _HIGHEST)
        count = tl.load(state + _COUNT)
        total = tl.load(state + _TOTAL).to(tl.float64)
        amount = tl.load(state + _GATHERED).to(tl.float64)
        wanted = tl.maximum(params.top_p * total, 1.0)  # 1.0: the best token stays if top_p is 0
        has_kept = (params.top_k < vocab_size) | (amount >= wanted)
        if not has_kept:  # the threshold is below the bound
            right = left - 1
            left = tl.full([], LOWEST, tl.int64)
            amount = total
        is_gathered = has_kept & (count <= CAPACITY)
        best = logit_of(tl.load(state + _HIGHEST)).to(tl.float64) / params.temperature
        tokens = Tokens(
            logits_ptr + row * stride_logits_row,
            state + _FIRST_SLOT,
            tl.where(is_gathered, 0, vocab_size),
            tl.where(is_gathered, count, 0).to(tl.int32),
            params.temperature,
            best,
            best + params.log_min_p,
        )
        if params.top_k < vocab_size:
            num_kept, most = count.to(tl.float64), params.top_k.to(tl.float64)
            if params.log_min_p > float("-inf"):
                num_kept = reaching(tokens, left, False, TILE)
            left = search(tokens, left, right, num_kept, most, False, PIVOTS, TILE)
            if params.top_p <= 1.0:
                amount = reaching(tokens, left, True, TILE)
                wanted = tl.maximum(params.top_p * amount, 1.0)
        if params.top_p <= 1.0:
            left = search(tokens, left, right, amount, wanted, True, PIVOTS, TILE)

        for start in range(0, tokens.in_row + tokens.gathered, TILE):
            key = load_token_keys(tokens, start, TILE)
            x, token = logit_of(key), token_of(key)
            scaled = x.to(tl.float64) / params.temperature
            kept = (x > float("-inf")) & (scaled >= tokens.least) & (key >= left)
            score = tl.where(kept, scaled + gumbel_of(params.noise_key, token), float("-inf"))
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
) -> Tensor:
    """Implement `baton_kernels.sampling.draw_tokens` in Triton. A NaN logit counts as -inf.

    Raises:
        ValueError: the vocabulary has 2**24 tokens or more.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size >= 2**24:
        raise ValueError(
            f"vocabularies of 2**24 tokens and more cannot be sampled; this one has {vocab_size}"
        )
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    config = configuration("sampling", shape_class(num_rows, vocab_size), logits.device, DEFAULT)
    num_blocks, num_tiles = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, config["tile"])
    width = _FIRST_SLOT.value + max(CAPACITY, num_blocks, 2 * num_tiles)
    state = torch.empty(num_rows, width, dtype=torch.int64, device=logits.device)
    table = _upload(params, keys, vocab_size, logits.device)
    of_tile = {"TILE": config["tile"], "num_warps": config["num_warps"]}
    of_row = {"PIVOTS": PIVOTS, "TILE": config["row_tile"], "num_warps": config["row_warps"]}
    tiles, stride = (num_rows, num_tiles), logits.stride(0)
    if any(0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0 for p in params):
        _block_maxima_kernel[tiles](
            state, logits, width, vocab_size, stride, BLOCK_TOKENS=BLOCK, **of_tile
        )
        _bounds_kernel[(num_rows,)](
            state, table, logits, width, vocab_size, BLOCK_TOKENS=BLOCK, **of_row
        )
    _collect_kernel[tiles](
        state, table, logits, width, vocab_size, stride, CAPACITY=CAPACITY, **of_tile
    )
    _draw_kernel[(num_rows,)](
        out, state, table, logits, width, vocab_size, stride, num_tiles, CAPACITY=CAPACITY, **of_row
    )
    return out


def _upload(
    params: Sequence[DrawParams], keys: Sequence[int], vocab_size: int, device: torch.device
) -> Tensor:
    """Copy the parameters of all rows to the device: int64 [rows, 6], read as `_Params`."""
    top_p_rank = math.ceil(triton.cdiv(vocab_size, BLOCK) * TOP_P_BLOCKS)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    host = torch.empty(len(params), 6, dtype=torch.int64, pin_memory=device.type == "cuda")
    integers = host.numpy()
    integers[:, 0] = [
        top_p_rank if k == vocab_size and p.top_p < 1 else k
        for k, p in zip(top_k, params, strict=True)
    ]
    integers[:, 1] = np.array(keys, dtype=np.uint64).view(np.int64)
    integers[:, 2] = top_k
    floats = integers.view(np.float64)
    floats[:, 3] = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    floats[:, 4] = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floats[:, 5] = [p.top_p if p.top_p < 1 else 2.0 for p in params]
    return host.to(device, non_blocking=True)
