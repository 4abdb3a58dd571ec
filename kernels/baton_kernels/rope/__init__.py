"""Rotary position embedding (Su et al. 2021), after an optional RMSNorm of each head.

The dimensions i and i + d/2 of a head with d dimensions are a pair. At position p, the pair is
rotated by the angle p * inv_freq[i], as in Hugging Face checkpoints:

    y[i]       = x[i] * cos - x[i + d/2] * sin
    y[i + d/2] = x[i + d/2] * cos + x[i] * sin

The implementations are C++ (../cpu/source/elementwise.h), torch (reference.py) and Triton
(triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       queries and keys, read and written, and the angles
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.rope.reference import rotate_qk_reference


def rotary_angles(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the rotary angles of a step's positions.

    Args:
        positions: integers of shape [num_tokens].
        inv_freq: rotary frequencies, float32 of shape [head_dim / 2].
        scale: factor of cosines and sines: YaRN's attention factor (Peng et al. 2023, section 3.4).

    Returns:
        cos and sin, each float32 of shape [num_tokens, head_dim / 2].
    """
    angles = positions.float()[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate_qk(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of a QKV projection, after an optional RMSNorm of each head.

    Args:
        qkv: query heads, key heads and value heads of each token, of shape
            [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        num_heads: number of query heads.
        num_kv_heads: number of key heads, and of value heads.
        cos: float32 of shape [num_tokens, head_dim / 2], see `rotary_angles`.
        sin: like cos.
        q_weight: RMSNorm weight of query heads (Qwen3), of shape [head_dim]. None: no norm.
        k_weight: the same for key heads. Give both weights or neither.
        eps: epsilon of the RMSNorm.

    Returns:
        Queries [num_tokens, num_heads, head_dim] and keys [num_tokens, num_kv_heads, head_dim],
        computed in float32 and rounded to qkv's dtype.
    """
    # Under torch.compile, the reference runs, because it is fused with neighbouring operations.
    if qkv.is_cuda and not torch.compiler.is_compiling():
        from baton_kernels.rope.triton_kernel import rotate_qk_triton

        return rotate_qk_triton(qkv, num_heads, num_kv_heads, cos, sin, q_weight, k_weight, eps)
    if (ops := cpu.ops_for(qkv)) is not None:
        return ops.rotate_qk(qkv, num_heads, num_kv_heads, cos, sin, q_weight, k_weight, eps)
    return rotate_qk_reference(qkv, num_heads, num_kv_heads, cos, sin, q_weight, k_weight, eps)
