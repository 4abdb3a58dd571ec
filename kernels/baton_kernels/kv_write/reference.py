"""KV write in torch, token by token, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  #: Larger magnitudes saturate; fp8 has no infinity.


def to_fp8(values: Tensor, scale: Tensor | None) -> Tensor:
    """Divide values by the scale of their head, and saturate to float8_e4m3fn. NaN stays NaN.

    Args:
        values: tensor of shape [num_tokens, num_kv_heads, head_dim].
        scale: tensor of shape [num_kv_heads]; None means 1.
    """
    scaled = values.float() if scale is None else values.float() / scale[:, None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Implement `baton_kernels.kv_write.write_kv` in torch, without `plan`."""
    if key_cache.dtype == torch.float8_e4m3fn:
        key, value = to_fp8(key, key_scale), to_fp8(value, value_scale)
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, :, slot % block_size] = value[token].to(
                value_cache.dtype
            )
