"""KV write in Triton. A program copies a few KV heads of one token, scaled if the cache is fp8."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.kernel_arguments import Caches, Heads
from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. heads: number of heads per program, a power of two.
CANDIDATES: list[Configuration] = [
    {"heads": heads, "num_warps": num_warps} for heads in (1, 2, 4, 8) for num_warps in (1, 2, 4)
]


@functools.cache
def shape_class(num_tokens: int, num_kv_heads: int, head_dim: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes."""
    return f"{'few' if num_tokens <= 256 else 'many'}/kv_heads={num_kv_heads}/head_dim={head_dim}"


@triton.jit
def _to_fp8(values, scale_ptr, head, head_mask, dtype: tl.constexpr):
    """Divide values [HEADS, dims] by scales [HEADS], and saturate at 448, fp8's largest number."""
    scaled = values.to(tl.float32) / tl.load(scale_ptr + head, mask=head_mask, other=1.0)
    scaled = tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _write_kv_kernel(
    keys: Heads,
    values: Heads,
    caches: Caches,
    slot_mapping_ptr,  # int64 [num_tokens]
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (head < num_kv_heads) & (dims < HEAD_DIM)
    key = tl.load(keys.ptr + token * keys.stride_token + head * keys.stride_head + dims, mask=mask)
    value = tl.load(
        values.ptr + token * values.stride_token + head * values.stride_head + dims, mask=mask
    )
    dtype = caches.k_ptr.dtype.element_ty
    if caches.key_scale_ptr is not None:
        key = _to_fp8(key, caches.key_scale_ptr, head, head < num_kv_heads, dtype)
        value = _to_fp8(value, caches.value_scale_ptr, head, head < num_kv_heads, dtype)
    target = (
        (slot // BLOCK_SIZE) * caches.stride_block
        + head * caches.stride_head
        + (slot % BLOCK_SIZE) * caches.stride_slot
        + dims
    )
    tl.store(caches.k_ptr + target, key.to(dtype), mask=mask)
    tl.store(caches.v_ptr + target, value.to(dtype), mask=mask)


def write_kv_triton(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Implement `baton_kernels.kv_write.write_kv` in Triton, which needs no plan.

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
            "the Triton KV write needs equal strides of key_cache and value_cache, and stride 1 in "
            "the last dimension of key, value and both caches"
        )
    if num_tokens == 0:
        return
    if key_cache.dtype != torch.float8_e4m3fn:
        key_scale = value_scale = None
    elif key_scale is None or value_scale is None:
        key_scale = value_scale = torch.ones(num_kv_heads, dtype=torch.float32, device=key.device)
    head_dim_padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_kv_heads), max(1024 // head_dim_padded, 1))
    default = {"heads": heads, "num_warps": min(max(heads * head_dim_padded // 256, 1), 4)}
    config = configuration(
        "kv_write", shape_class(num_tokens, num_kv_heads, head_dim), key.device, default
    )
    _write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, config["heads"]))](
        Heads(key, *key.stride()[:2]),
        Heads(value, *value.stride()[:2]),
        Caches(key_cache, value_cache, key_scale, value_scale, *key_cache.stride()[:3]),
        slot_mapping,
        num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=key_cache.shape[2],
        HEADS=config["heads"],
        num_warps=config["num_warps"],
    )
