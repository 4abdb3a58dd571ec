"""The Triton kernels of norm, rotary embedding and activation match their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.activation.reference import silu_and_mul_reference
from baton_kernels.activation.triton_kernel import silu_and_mul_triton
from baton_kernels.norm import triton_kernel as norm_kernel
from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference
from baton_kernels.norm.triton_kernel import add_rms_norm_triton, rms_norm_triton
from baton_kernels.rope import rotary_angles
from baton_kernels.rope.reference import rotate_qk_reference
from baton_kernels.rope.triton_kernel import rotate_qk_triton
from support.kernels.paged_cases import dtypes

pytestmark = pytest.mark.usefixtures("_poisoned_memory")


def assert_within_two_roundings(actual: Tensor, expected: Tensor, summands: float = 0.0) -> None:
    """Compare up to two roundings of the dtype: one of the norm and one of its product.

    Args:
        summands: their magnitude, if the result is a sum of rounded values, which may be far
        smaller.
    """
    two_roundings = max(2 * torch.finfo(actual.dtype).eps, 1.3e-6)
    torch.testing.assert_close(
        actual, expected, rtol=two_roundings, atol=max(summands * two_roundings, 1e-5)
    )


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def poisoned(x: Tensor) -> Tensor:
    """Return the same values as a view whose rows are followed by NaN."""
    padded = torch.full(
        (*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device
    )
    padded[..., :-3] = x
    return padded[..., :-3]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 24), (3, 2, 63), (300, 40)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, triton_device: str) -> None:
    x, weight = (random(*s, dtype=dtype, device=triton_device) for s in (shape, shape[-1:]))
    actual = rms_norm_triton(poisoned(x), weight, 1e-6)
    assert_within_two_roundings(actual, rms_norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 96), (7, 33), (2, 64)])
@pytest.mark.parametrize("max_tile", [8192, 16], ids=["one tile", "several tiles"])
def test_add_rms_norm(
    num_tokens: int,
    dim: int,
    max_tile: int,
    dtype: torch.dtype,
    triton_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm_kernel, "MAX_TILE", max_tile)
    x, residual = (random(num_tokens, dim, dtype=dtype, device=triton_device) for _ in range(2))
    weight = random(dim, dtype=dtype, device=triton_device)
    normed, total = add_rms_norm_triton(poisoned(x), residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, expected_total, atol=0, rtol=0)
    assert_within_two_roundings(normed, expected)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 4, 4, 16), (3, 6, 2, 24), (2, 7, 1, 64), (0, 4, 2, 8)],
)
def test_rotate_qk(
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


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (7, 66), (2, 3, 1300), (0, 8)], ids=str)
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype, triton_device: str) -> None:
    gate_up = 4 * random(*shape, dtype=dtype, device=triton_device)
    # The kernel rounds once. The reference also rounds the activation.
    torch.testing.assert_close(
        silu_and_mul_triton(poisoned(gate_up)), silu_and_mul_reference(gate_up.float()).to(dtype)
    )
