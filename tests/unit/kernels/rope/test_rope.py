"""Rotary embedding matches its formula, and the Triton kernel its reference."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.norm import rms_norm
from baton_kernels.rope import rotary_angles, rotate_qk
from baton_kernels.rope.reference import rotate_qk_reference
from baton_kernels.rope.triton_kernel import rotate_qk_triton
from support.kernels.elementwise import assert_within_two_roundings, poisoned, random
from support.kernels.paged_cases import dtypes


def rotate(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Rotate `x` as the queries of a QKV tensor with one key and one value head."""
    num_tokens, num_heads, head_dim = x.shape
    qkv = torch.cat((x.flatten(1), torch.randn(num_tokens, 2 * head_dim)), dim=1)
    return rotate_qk(qkv, num_heads, 1, *rotary_angles(positions, inv_freq, scale))[0]


def test_heads_are_normalized_before_they_are_rotated() -> None:
    qkv, q_weight, k_weight = torch.randn(3, (4 + 2 * 2) * 8), torch.rand(8), torch.rand(8)
    angles = rotary_angles(torch.tensor([0, 3, 9]), torch.rand(4))
    q, k = rotate_qk(qkv, 4, 2, *angles, q_weight, k_weight, 1e-6)
    heads = qkv.view(3, 8, 8)
    normed = torch.cat(
        (
            rms_norm(heads[:, :4], q_weight, 1e-6),
            rms_norm(heads[:, 4:6], k_weight, 1e-6),
            heads[:, 6:],
        ),
        dim=1,
    )
    expected_q, expected_k = rotate_qk(normed.flatten(1), 4, 2, *angles)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(k, expected_k)


def test_rotary_embedding_rotates_pairs() -> None:
    x, positions = torch.randn(4, 2, 8), torch.tensor([0, 1, 5, 1000])
    inv_freq = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    rotated = rotate(x, positions, inv_freq)
    torch.testing.assert_close(rotated[0], x[0])
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(
        1j * positions[:, None, None] * inv_freq
    )
    torch.testing.assert_close(
        rotated, torch.cat((pairs.real, pairs.imag), -1), atol=1e-4, rtol=1e-4
    )


def test_a_rotary_scale_multiplies_queries_and_keys() -> None:
    x, positions, inv_freq = torch.randn(3, 2, 8), torch.tensor([0, 2, 77]), torch.rand(4)
    plain = rotate(x, positions, inv_freq)
    scaled = rotate(x, positions, inv_freq, scale=1.25)
    torch.testing.assert_close(scaled, 1.25 * plain)


def test_rotary_scores_depend_only_on_the_distance() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    inv_freq = 10000.0 ** -(torch.arange(0, 16, 2).float() / 16)

    def score(q_position: int, k_position: int) -> float:
        q_rotated, k_rotated = [
            rotate(x, torch.tensor([p]), inv_freq) for x, p in ((q, q_position), (k, k_position))
        ]
        return float((q_rotated * k_rotated).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 4, 4, 16), (3, 6, 2, 24), (2, 7, 1, 64), (0, 4, 2, 8)],
)
def test_the_triton_kernel_of_rotate_qk(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: bool,
    dtype: torch.dtype,
    triton_device: str,
) -> None:
    qkv = random(
        num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=triton_device
    )
    positions = torch.randint(5000, (num_tokens,), device=triton_device)
    angles = rotary_angles(positions, torch.rand(head_dim // 2, device=triton_device), 1.2)
    weights = [
        random(head_dim, dtype=dtype, device=triton_device) if norm else None for _ in range(2)
    ]
    q, k = rotate_qk_triton(poisoned(qkv), num_heads, num_kv_heads, *angles, *weights, 1e-6)
    expected_q, expected_k = rotate_qk_reference(
        qkv, num_heads, num_kv_heads, *angles, *weights, 1e-6
    )
    for actual, expected in ((q, expected_q), (k, expected_k)):
        assert_within_two_roundings(actual, expected, summands=8.0 if norm else 0.0)
