"""KV write in Triton: one program per (token, KV head) copies one key row and one value row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    key_cache_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache_ptr,  # like key_cache_ptr, same strides
    slot_mapping_ptr,  # [num_tokens]
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, HEAD_DIM_PADDED)
    mask = dims < HEAD_DIM
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dims, mask=mask)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dims, mask=mask)
    target = (
        (slot // BLOCK_SIZE) * stride_kv_block + head * stride_kv_head + (slot % BLOCK_SIZE) * stride_kv_slot + dims
    )
    tl.store(key_cache_ptr + target, key.to(key_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(value_cache_ptr + target, value.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Arguments as `baton_kernels.kv_write.write_kv`.

    Raises:
        ValueError: if strides are not what the kernel addresses.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if (
        key_cache.stride() != value_cache.stride()
        or key_cache.stride(3) != 1
        or key.stride(2) != 1
        or value.stride(2) != 1
    ):
        raise ValueError("key and value cache need equal strides, and the head dimension of all of them stride 1")
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=key_cache.shape[2],
        num_warps=1,
    )
