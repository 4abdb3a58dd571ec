"""The sampler's noise: a hash of (seed, position, sample index, token id), without generator state.

The hash is SplitMix64 (Steele, Lea and Flood 2014), used as a counter-based generator. `noise_key`
chains the mixer over seed, position and sample index. Token t gets the 64 bits
mix(key + (t + 1) * GAMMA), which are the same on every device. The upper 52 bits give u in (0, 1).
The noise is -log(-log(u)) in float64, which has the standard Gumbel distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK64 = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MANTISSA_BITS = 52  # one bit less than float64 has, so that u stays below 1


def noise_key(seed: int, position: int, sample_index: int) -> int:
    """Return the 64-bit key from which the noise of every token id is computed."""
    return _mix(_mix(_mix(seed) + position) + sample_index)


def keys_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Convert unsigned 64-bit keys to an int64 tensor of shape [len(keys)] with the same bits."""
    return torch.tensor([signed(key) for key in keys], dtype=torch.int64, device=device)


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise per (key, token id), float64 [len(keys), vocab_size]."""
    return gumbel(
        noise_mantissa(keys_tensor(keys, device)[:, None], torch.arange(vocab_size, device=device))
    )


def noise_mantissa(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return 52 random bits per (key, token id), as int64 in [0, 2**52).

    The arguments are broadcast. Larger results give larger noise, because `gumbel` is monotonic.
    """
    bits = keys + (token_ids + 1) * signed(GAMMA)
    shifted = torch.empty_like(bits)
    # torch multiplies modulo 2**64. Its shift copies the sign bit, which the mask removes.
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 0)):
        torch.bitwise_right_shift(bits, shift, out=shifted)
        bits ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor:
            bits *= signed(factor)
    bits >>= 64 - _MANTISSA_BITS
    return bits.bitwise_and_((1 << _MANTISSA_BITS) - 1)


def gumbel(mantissa: Tensor) -> Tensor:
    """Convert the 52 bits of `noise_mantissa` to standard Gumbel noise in float64."""
    uniform = (mantissa.double() + 0.5) * 2.0**-_MANTISSA_BITS
    return -torch.log(-torch.log(uniform))


def least_mantissa(noise: Tensor) -> Tensor:
    """Return the smallest mantissa (int64) for which `gumbel` is at least `noise` (float64).

    Rounding can make the result slightly too low, but never too high. Callers must therefore still
    compute the exact noise of each token whose mantissa is at least the result.
    """
    fraction_above = -torch.expm1(-torch.exp(-noise))
    count = (fraction_above * (1 + 1e-9) * 2.0**_MANTISSA_BITS).ceil() + 2
    return (2.0**_MANTISSA_BITS - count).clamp_min(0).long()


def _mix(value: int) -> int:
    """Apply a SplitMix64 step to a Python integer. `noise_mantissa` does the same for tensors."""
    value = (value + GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK64
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK64
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits as the unsigned integer `value`."""
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value
