"""KV write (vLLM: reshape_and_cache): stores keys and values of new tokens in their cache slots.

    key_cache[slot // block_size, :, slot % block_size] = key[token]      slot = slot_mapping[token]

Values are stored in the same way. Tokens with a negative slot (padding, warm-up) are not stored. No
caller uses the scales yet. They are for fp8 KV caches.

The implementations are C++ (../cpu/source/tensor_ops.h), torch
(torch_cpu.py) and Triton (triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       keys and values, read and written, and the slot mapping
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.kv_write.reference import to_fp8
from baton_kernels.kv_write.torch_cpu import Slots, write_kv_cpu

__all__ = ["Slots", "plan_write", "write_kv"]


def plan_write(key_cache: Tensor, slot_mapping: Tensor) -> Slots | None:
    """Prepare the KV write of a step, once for all layers.

    Args:
        key_cache: the key cache of any layer. All layers have the same shape and dtype.
        slot_mapping: the same as in `write_kv`.

    Returns:
        Block and offset of each slot, or None for Triton and C++, which need no plan.
    """
    if key_cache.is_cuda or _is_compiled_for(key_cache):
        return None
    return Slots(slot_mapping, key_cache.shape[2])


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    plan: Slots | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write keys and values into the caches, on the device of `key`.

    Args:
        key: tensor of shape [num_tokens, num_kv_heads, head_dim].
        value: like key.
        key_cache: tensor of shape [num_blocks, num_kv_heads, block_size, head_dim], last stride 1.
        value_cache: like key_cache, with the same strides.
        slot_mapping: slot of each token, int64 of shape [num_tokens]. A token with a negative slot
            is not stored. All other slots are distinct.
        plan: result of `plan_write` for this slot mapping.
        key_scale: float32 of shape [num_kv_heads]; None means 1. Keys for an fp8 cache are divided
            by the scale of their head and saturated.
        value_scale: the same for values. Give both scales or neither.

    Raises:
        ValueError: on a GPU, the kernel does not support the strides.
        IndexError: on a CPU, a slot lies past the cache's end.
    """
    if key.is_cuda:
        from baton_kernels.kv_write.triton_kernel import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    elif cpu.OPS is not None and _is_compiled_for(key_cache):
        cpu.OPS.write_kv(key, value, key_cache, value_cache, slot_mapping)
    else:
        if key_cache.dtype == torch.float8_e4m3fn:
            key, value = to_fp8(key, key_scale), to_fp8(value, value_scale)
        assert plan is not None
        write_kv_cpu(key, value, key_cache, value_cache, plan)


def _is_compiled_for(cache: Tensor) -> bool:
    """Return whether the compiled operation supports the dtype of `cache`. fp8 is not supported."""
    return cpu.OPS is not None and cache.dtype in cpu.DTYPES
