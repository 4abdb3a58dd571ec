"""KV write in torch: one indexed assignment. The truth for tests, and the CPU's implementation."""

from __future__ import annotations

from torch import Tensor


def write_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Arguments as `baton_kernels.kv_write.write_kv`."""
    block_size = key_cache.shape[2]
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block, slot = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, :, slot] = key.to(key_cache.dtype)
    value_cache[block, :, slot] = value.to(value_cache.dtype)
