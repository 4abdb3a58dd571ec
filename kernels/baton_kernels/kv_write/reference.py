"""KV write in torch, token by token, for tests."""

from __future__ import annotations

from torch import Tensor


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Compute `baton_kernels.kv_write.write_kv`, with the same arguments."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, :, slot % block_size] = value[token].to(
                value_cache.dtype
            )
