"""Device functions of the draw: noise, probabilities, token order, and search in that order."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from baton_kernels.sampling.noise import GAMMA, MIX_1, MIX_2

_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite float32
_UNIT = tl.constexpr(2.0**32)  # fixed point of probabilities relative to the best token's
# Adding and subtracting it rounds to an integer, half to even.
_TO_INTEGER = tl.constexpr(2.0**52)


class Tokens(NamedTuple):
    """The tokens of a row that a search reads: the whole row or the gathered ones."""

    row_ptr: tl.tensor  #: float32 [vocab_size]: logits of the row.
    gathered_ptr: tl.tensor  #: float32 [CAPACITY]: gathered logits.
    gathered_id_ptr: tl.tensor  #: int32 [CAPACITY]: their token ids.
    in_row: tl.tensor  #: Tokens to read from the row; 0 if it reads the gathered ones.
    gathered: tl.tensor  #: Gathered tokens to read; 0 if it reads the row.
    temperature: tl.tensor
    best: tl.tensor  #: float64: largest logit / temperature.
    least: tl.tensor  #: float64: lower bound of the logit / temperature that min_p keeps.


@triton.jit
def order_key(x):
    """Map float32 to int32 in the same order. Both zeros map to 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_place(key, token):
    """Return an int64 that orders tokens by logit, then by descending id. Ids have 24 bits."""
    return (key.to(tl.int64) << 24) + (0xFFFFFF - token)


@triton.jit
def gumbel_of(noise_key, token_id):
    """Return float64 noise; see noise.py."""
    bits = (
        noise_key.to(tl.uint64, bitcast=True) + (token_id.to(tl.int64) + 1).to(tl.uint64) * _GAMMA
    )
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    mantissa = (bits ^ (bits >> 31)) >> 12
    uniform = (mantissa.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def relative_weight(scaled, best):
    """Return the probability relative to the best token's, in fixed point: integers in float64."""
    return (tl.exp(scaled - best) * _UNIT + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def load_tokens(tokens: Tokens, start, TILE: tl.constexpr):
    """Load logits and ids of a tile of tokens, with -inf past the end."""
    place = start + tl.arange(0, TILE)
    in_row, gathered = place < tokens.in_row, place < tokens.gathered
    from_row = tl.load(tokens.row_ptr + place, mask=in_row, other=float("-inf"))
    x = tl.load(tokens.gathered_ptr + place, mask=gathered, other=float("-inf"))
    token = tl.load(tokens.gathered_id_ptr + place, mask=gathered, other=0)
    return tl.maximum(x, from_row), tl.where(in_row, place, token)


@triton.jit
def load_amounts(tokens: Tokens, start, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """Return the places in the order of a tile of tokens, and their amounts in float64.

    The amount of a token that min_p keeps is its probability, or 1 without WEIGH. Others have 0.
    """
    x, token = load_tokens(tokens, start, TILE)
    scaled = x.to(tl.float64) / tokens.temperature
    amount = tl.full(x.shape, 1.0, tl.float64)
    if WEIGH:
        amount = relative_weight(scaled, tokens.best)
    return order_place(order_key(x), token), tl.where(
        (x > float("-inf")) & (scaled >= tokens.least), amount, 0.0
    )


@triton.jit
def reaching(tokens: Tokens, threshold, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """Return the number of tokens that reach the threshold, or the sum of their probabilities."""
    result = tl.zeros([], tl.float64)
    for start in range(0, tokens.in_row + tokens.gathered, TILE):
        place, amount = load_amounts(tokens, start, WEIGH, TILE)
        result += tl.sum(tl.where(place >= threshold, amount, 0.0), axis=0)
    return result


@triton.jit
def search(
    tokens: Tokens,
    threshold,
    highest,
    wanted,
    WEIGH: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the highest place, at least `threshold`, that tokens of a total amount `wanted` reach.

    The amount is a number of tokens, or with WEIGH a sum of probabilities.
    """
    left = threshold
    right = highest
    while left < right:
        step = (right - left + PIVOTS) // (PIVOTS + 1)
        pivots = left + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        reach = tl.zeros([PIVOTS], tl.float64)
        for start in range(0, tokens.in_row + tokens.gathered, TILE):
            place, amount = load_amounts(tokens, start, WEIGH, TILE)
            reach += tl.sum(
                tl.where(place[None, :] >= pivots[:, None], amount[None, :], 0.0), axis=1
            )
        left += tl.sum((reach >= wanted).to(tl.int64), axis=0) * step
        right = tl.minimum(right, left + step - 1)
    return left
