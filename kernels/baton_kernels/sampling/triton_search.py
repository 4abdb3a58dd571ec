"""Triton functions for the draw: noise, probabilities, token keys, and search by token key.

A token key is an int64 that orders tokens by logit, and tokens of equal logits by descending id:

    bits 24 to 63   the logit's key (`logit_key`), with its sign extended
    bits 0 to 23    0xFFFFFF - token id
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from baton_kernels.sampling.noise import GAMMA, MIX_1, MIX_2

_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_LAST_ID = tl.constexpr(0xFFFFFF)
LOWEST = tl.constexpr(-2139095040 << 24)  #: Token key that every token with a finite logit reaches.
MASKED = tl.constexpr(-2139095041 << 24)  #: Lowest token key with a logit of -inf.
_UNIT = tl.constexpr(2.0**32)  # fixed point of probabilities relative to the best token's
# Adding and subtracting this number rounds to an integer, half to even.
_TO_INTEGER = tl.constexpr(2.0**52)


class Tokens(NamedTuple):
    """Tokens of one row for `search`: either all tokens of the row, or a list of token keys.

    The list has the gathered tokens, which reach a lower bound, or the best token of each block.
    """

    row_ptr: tl.tensor  #: float32 [vocab_size]: logits of the row.
    gathered_ptr: tl.tensor  #: int64 [gathered]: token keys of gathered tokens, or of block maxima.
    in_row: tl.tensor  #: Number of tokens to read from the row; 0 with gathered tokens.
    gathered: tl.tensor  #: Number of gathered tokens to read; 0 with tokens from the row.
    temperature: tl.tensor
    best: tl.tensor  #: float64: largest logit / temperature.
    least: tl.tensor  #: float64: lower bound of the logit / temperature that min_p keeps.


@triton.jit
def logit_key(x):
    """Map float32 values to int32 keys with the same order.

    Both zeros map to 0. NaN maps to the key of -inf.
    """
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def token_key(key, token):
    """Return the token key, an int64 that combines a token's `logit_key` and its id.

    Higher logits have higher keys. Among equal logits, lower ids have higher keys.
    """
    return (key.to(tl.int64) << 24 | _LAST_ID) - token


@triton.jit
def lowest_of_logit(key):
    """Return the lowest token key with the same logit as `key`."""
    return key & ~_LAST_ID


@triton.jit
def highest_of_logit(key):
    """Return the highest token key with the same logit as `key`."""
    return key | _LAST_ID


@triton.jit
def token_of(key):
    """Return the token id of a token key."""
    return (~key & _LAST_ID).to(tl.int32)


@triton.jit
def logit_of(key):
    """Return the float32 logit of a token key."""
    bits = (key >> 24).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def gumbel_of(noise_key, token_id):
    """Return the Gumbel noise of a token in float64, as `noise.gumbel_noise` does."""
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
    """Return exp(scaled - best) in units of 2**-32, rounded.

    This is the token's probability relative to the probability of the row's most likely token.
    """
    return (tl.exp(scaled - best) * _UNIT + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def load_token_keys(tokens: Tokens, start, TILE: tl.constexpr):
    """Return the token keys of a tile of tokens, with MASKED past the end."""
    index = start + tl.arange(0, TILE)
    in_row = index < tokens.in_row
    x = tl.load(tokens.row_ptr + index, mask=in_row, other=float("-inf"))
    key = tl.load(tokens.gathered_ptr + index, mask=index < tokens.gathered, other=MASKED)
    return tl.where(in_row, token_key(logit_key(x), index), key)


@triton.jit
def amount_of(tokens: Tokens, key, WEIGH: tl.constexpr):
    """Return the amount that each token adds to the total of `search`.

    The amount is the token's `relative_weight`; without WEIGH, it is 1. For masked tokens and for
    tokens that min_p removes, it is 0.
    """
    x = logit_of(key)
    scaled = x.to(tl.float64) / tokens.temperature
    amount = tl.full(key.shape, 1.0, tl.float64)
    if WEIGH:
        amount = relative_weight(scaled, tokens.best)
    return tl.where((x > float("-inf")) & (scaled >= tokens.least), amount, 0.0)


@triton.jit
def reaching(tokens: Tokens, threshold, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """Return the total amount (`amount_of`) of the tokens that reach `threshold`.

    A token reaches a token key if its own key is at least as high.
    """
    result = tl.zeros([], tl.float64)
    for start in range(0, tokens.in_row + tokens.gathered, TILE):
        key = load_token_keys(tokens, start, TILE)
        amount = amount_of(tokens, key, WEIGH)
        result += tl.sum(tl.where(key >= threshold, amount, 0.0), axis=0)
    return result


@triton.jit
def search(
    tokens: Tokens,
    left,  # token key: the lowest possible result
    right,  # token key: the highest possible result
    amount,  # float64: total amount of the tokens that reach `left`
    wanted,  # float64
    WEIGH: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the smallest set of most likely tokens whose total `amount_of` is at least `wanted`.

    The total is the number of tokens, or with WEIGH the sum of their relative weights. The search
    divides the range of logits first. The range of ids is divided only if the set ends between
    tokens of equal logits.

    Returns:
        A token key that bounds the set. The tokens of the set have this key or higher keys. All
        other tokens with a positive amount have lower keys. If the total of the tokens that
        reach `left` is less than `wanted`, the result is the argument `left`.
    """
    while (left < right) & (amount - amount_of(tokens, left, WEIGH) >= wanted):
        step = (right - left) // (PIVOTS + 1)
        step = tl.where(right - left > _LAST_ID, step | _LAST_ID, step) + 1
        pivots = left + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        reach = tl.zeros([PIVOTS], tl.float64)
        for start in range(0, tokens.in_row + tokens.gathered, TILE):
            key = load_token_keys(tokens, start, TILE)
            part = amount_of(tokens, key, WEIGH)
            reach += tl.sum(tl.where(key[None, :] >= pivots[:, None], part[None, :], 0.0), axis=1)
        left += tl.sum((reach >= wanted).to(tl.int64), axis=0) * step
        right = tl.minimum(right, left + step - 1)
        amount = tl.min(tl.where(reach >= wanted, reach, amount), axis=0)
    return left
