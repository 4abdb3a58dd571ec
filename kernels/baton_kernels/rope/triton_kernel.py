"""Rotary embedding in Triton, with the optional norm. A program rotates a few heads of one token.

One launch reads the query and key heads of qkv in place, and writes both results.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. heads: number of heads per program.
CANDIDATES: list[Configuration] = [
    {"heads": heads, "num_warps": num_warps} for heads in (2, 4, 8, 16) for num_warps in (1, 2, 4)
]


@functools.cache
def shape_class(num_tokens: int, head_dim: int) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes."""
    return f"{'few' if num_tokens <= 256 else 'many'}/head_dim={head_dim}"


@triton.jit
def _rotate_qk_kernel(
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cos_ptr,  # [num_tokens, head_dim / 2]
    sin_ptr,  # [num_tokens, head_dim / 2]
    q_weight_ptr,  # [head_dim]; None: no norm
    k_weight_ptr,  # like q_weight_ptr
    eps,
    stride_qkv_token,
    stride_cos_token,
    stride_sin_token,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, HALF_PADDED)[None, :]
    is_q = head < NUM_HEADS
    mask = (head < NUM_HEADS + NUM_KV_HEADS) & (dim < HALF)
    source = qkv_ptr + token * stride_qkv_token + head * (2 * HALF) + dim
    first = tl.load(source, mask=mask, other=0.0)  # [HEADS, HALF_PADDED]
    second = tl.load(source + HALF, mask=mask, other=0.0)
    dtype = q_ptr.dtype.element_ty
    if q_weight_ptr is not None:
        first_wide, second_wide = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(first_wide * first_wide + second_wide * second_wide, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        q_mask, k_mask = mask & is_q, mask & (head >= NUM_HEADS)
        first_weight = tl.load(q_weight_ptr + dim + 0 * head, mask=q_mask, other=0.0)
        first_weight += tl.load(k_weight_ptr + dim + 0 * head, mask=k_mask, other=0.0)
        second_weight = tl.load(q_weight_ptr + HALF + dim + 0 * head, mask=q_mask, other=0.0)
        second_weight += tl.load(k_weight_ptr + HALF + dim + 0 * head, mask=k_mask, other=0.0)
        first = (first_wide * factor).to(dtype) * first_weight
        second = (second_wide * factor).to(dtype) * second_weight
    cos = tl.load(cos_ptr + token * stride_cos_token + dim, mask=dim < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * stride_sin_token + dim, mask=dim < HALF, other=0.0)
    rotated_first = (first.to(tl.float32) * cos - second.to(tl.float32) * sin).to(dtype)
    rotated_second = (second.to(tl.float32) * cos + first.to(tl.float32) * sin).to(dtype)

    to_q = q_ptr + (token * NUM_HEADS + head) * (2 * HALF) + dim
    tl.store(to_q, rotated_first, mask=mask & is_q)
    tl.store(to_q + HALF, rotated_second, mask=mask & is_q)
    to_k = k_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS) * (2 * HALF) + dim
    tl.store(to_k, rotated_first, mask=mask & (head >= NUM_HEADS))
    tl.store(to_k + HALF, rotated_second, mask=mask & (head >= NUM_HEADS))


def rotate_qk_triton(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.rope.rotate_qk` in Triton.

    Raises:
        ValueError: the kernel does not support the strides.
    """
    if qkv.stride(-1) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise ValueError("the last dimension of qkv, cos and sin needs stride 1")
    num_tokens = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q, k
    default = {"heads": 4 if num_tokens <= 256 else 8, "num_warps": 2}
    config = configuration("rope", shape_class(num_tokens, head_dim), qkv.device, default)
    _rotate_qk_kernel[(num_tokens, triton.cdiv(num_heads + num_kv_heads, config["heads"]))](
        q,
        k,
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS=config["heads"],
        num_warps=config["num_warps"],
    )
    return q, k
