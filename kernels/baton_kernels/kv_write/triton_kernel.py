"""KV write in Triton: one program per (token, few KV heads) copies, and scales for an fp8 cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.configurations import Configuration, configuration

#: heads: heads per program, a power of two.
CANDIDATES: list[Configuration] = [
    {"heads": heads, "num_warps": num_warps} for heads in (1, 2, 4, 8) for num_warps in (1, 2, 4)
]


def shape_class(num_tokens: int, num_kv_heads: int, head_dim: int) -> str:
    """Return the class a launch is tuned for."""
    return f"{'few' if num_tokens <= 256 else 'many'}/kv_heads={num_kv_heads}/head_dim={head_dim}"


@triton.jit
def _to_fp8(values, scale_ptr, head, head_mask, dtype: tl.constexpr):
    """Divide [HEADS, dims] by scale [HEADS] and saturate at 448, the format's largest number."""
    scaled = values.to(tl.float32) / tl.load(scale_ptr + head, mask=head_mask, other=1.0)
    scaled = tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    key_cache_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache_ptr,  # like key_cache_ptr, same strides
    slot_mapping_ptr,  # [num_tokens]
    key_scale_ptr,  # [num_kv_heads]
    value_scale_ptr,  # [num_kv_heads]
    num_kv_heads,
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
    HEADS: tl.constexpr,
    SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (head < num_kv_heads) & (dims < HEAD_DIM)
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dims, mask=mask)
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + dims, mask=mask
    )
    if SCALED:
        key = _to_fp8(key, key_scale_ptr, head, head < num_kv_heads, key_cache_ptr.dtype.element_ty)
        value = _to_fp8(
            value, value_scale_ptr, head, head < num_kv_heads, value_cache_ptr.dtype.element_ty
        )
    target = (
        (slot // BLOCK_SIZE) * stride_kv_block
        + head * stride_kv_head
        + (slot % BLOCK_SIZE) * stride_kv_slot
        + dims
    )
    tl.store(key_cache_ptr + target, key.to(key_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(value_cache_ptr + target, value.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Compute `baton_kernels.kv_write.write_kv`, with the same arguments.

    Raises:
        ValueError: the kernel does not support the strides.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if (
        key_cache.stride() != value_cache.stride()
        or key_cache.stride(3) != 1
        or key.stride(2) != 1
        or value.stride(2) != 1
    ):
        raise ValueError(
            "key and value cache need equal strides, and the head dimension of all of them stride 1"
        )
    if num_tokens == 0:
        return
    scaled = key_cache.dtype == torch.float8_e4m3fn
    if scaled and (key_scale is None or value_scale is None):
        key_scale = value_scale = torch.ones(num_kv_heads, dtype=torch.float32, device=key.device)
    head_dim_padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_kv_heads), max(1024 // head_dim_padded, 1))
    default = {"heads": heads, "num_warps": min(max(heads * head_dim_padded // 256, 1), 4)}
    config = configuration(
        "kv_write", shape_class(num_tokens, num_kv_heads, head_dim), key.device, default
    )
    _write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, config["heads"]))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale if scaled else slot_mapping,
        value_scale if scaled else slot_mapping,
        num_kv_heads,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=key_cache.shape[2],
        HEADS=config["heads"],
        SCALED=scaled,
        num_warps=config["num_warps"],
    )
