"""What the draw's programs share: noise, probabilities, and the order of a row's tokens with the search for a place in it.

The tokens looked at are those of the whole row or the gathered ones: of `in_row` and `gathered`, their numbers, one is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.sampling.noise import GAMMA, MIX_1, MIX_2

_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite float32
_UNIT = tl.constexpr(2.0**32)  # fixed point of probabilities relative to the best token's
_TO_INTEGER = tl.constexpr(
    2.0**52
)  # added and taken away again, it rounds to a whole number, half to even


@triton.jit
def order_key(x):
    """int32 in the order of float32; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_place(key, token):
    """int64 that orders tokens by logit, then lower ids higher; ids have 24 bits."""
    return (key.to(tl.int64) << 24) + (0xFFFFFF - token)


@triton.jit
def gumbel_of(noise_key, token_id):
    """float64 noise; see noise.py."""
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
    """The probability relative to the best token's in fixed point: a whole number in float64."""
    return (tl.exp(scaled - best) * _UNIT + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def load_tokens(
    row_ptr, gathered_ptr, gathered_id_ptr, start, in_row, gathered, TILE: tl.constexpr
):
    """Logits and ids of a tile of the row's tokens, or of the gathered ones: one of the two numbers is 0. -inf past the end."""
    place = start + tl.arange(0, TILE)
    from_row = tl.load(row_ptr + place, mask=place < in_row, other=float("-inf"))
    x = tl.load(gathered_ptr + place, mask=place < gathered, other=float("-inf"))
    token = tl.load(gathered_id_ptr + place, mask=place < gathered, other=0)
    return tl.maximum(x, from_row), tl.where(place < in_row, place, token)


@triton.jit
def amounts_of(x, token, temperature, best, least, WEIGH: tl.constexpr):
    """Of a tile's tokens their place in the order, and the probability or 1 of those that min_p keeps, else 0; float64."""
    scaled = x.to(tl.float64) / temperature
    amount = tl.full(x.shape, 1.0, tl.float64)
    if WEIGH:
        amount = relative_weight(scaled, best)
    return order_place(order_key(x), token), tl.where(
        (x > float("-inf")) & (scaled >= least), amount, 0.0
    )


@triton.jit
def reaching(
    row_ptr,
    gathered_ptr,
    gathered_id_ptr,
    in_row,
    gathered,
    temperature,
    best,
    least,
    threshold,
    WEIGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The number of tokens that reach the threshold, or the sum of their probabilities."""
    result = tl.zeros([], tl.float64)
    for start in range(0, in_row + gathered, TILE):
        x, token = load_tokens(
            row_ptr, gathered_ptr, gathered_id_ptr, start, in_row, gathered, TILE
        )
        place, amount = amounts_of(x, token, temperature, best, least, WEIGH)
        result += tl.sum(tl.where(place >= threshold, amount, 0.0), axis=0)
    return result


@triton.jit
def search(
    row_ptr,
    gathered_ptr,
    gathered_id_ptr,
    in_row,
    gathered,
    temperature,
    best,
    least,
    threshold,
    highest,
    wanted,
    WEIGH: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The last place, from the threshold on, that so many tokens reach, or tokens with so much probability."""
    left = threshold
    right = highest
    while left < right:
        step = (right - left + PIVOTS) // (PIVOTS + 1)
        pivots = left + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        reach = tl.zeros([PIVOTS], tl.float64)
        for start in range(0, in_row + gathered, TILE):
            x, token = load_tokens(
                row_ptr, gathered_ptr, gathered_id_ptr, start, in_row, gathered, TILE
            )
            place, amount = amounts_of(x, token, temperature, best, least, WEIGH)
            reach += tl.sum(
                tl.where(place[None, :] >= pivots[:, None], amount[None, :], 0.0), axis=1
            )
        left += tl.sum((reach >= wanted).to(tl.int64), axis=0) * step
        right = tl.minimum(right, left + step - 1)
    return left
