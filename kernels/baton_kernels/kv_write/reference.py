"""KV write in torch, token by token. The truth for tests."""

from __future__ import annotations

import torch
from torch import Tensor

#: Larger magnitudes saturate; the format has no infinity.
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def to_fp8(values: Tensor, scale: Tensor | None) -> Tensor:
    """values [num_tokens, num_kv_heads, head_dim] / scale [num_kv_heads], saturated, as float8_e4m3fn; a NaN stays one."""
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
    """Arguments as `baton_kernels.kv_write.write_kv`."""
    if key_cache.dtype == torch.float8_e4m3fn:
        key, value = to_fp8(key, key_scale), to_fp8(value, value_scale)
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, :, slot % block_size] = value[token].to(
                value_cache.dtype
            )
