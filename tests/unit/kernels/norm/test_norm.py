"""Norm matches its formula, and the Triton kernel its reference."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.norm import add_rms_norm, rms_norm
from baton_kernels.norm import triton_kernel as norm_kernel
from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference
from baton_kernels.norm.triton_kernel import add_rms_norm_triton, rms_norm_triton
from support.kernels.elementwise import assert_within_two_roundings, poisoned, random
from support.kernels.paged_cases import dtypes


def test_rms_norm_matches_the_formula() -> None:
    x, weight = torch.randn(5, 3, 24), torch.rand(24)
    expected = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)


def test_add_rms_norm_returns_the_norm_and_the_sum() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.rand(24)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 24), (3, 2, 63), (300, 40)], ids=str)
def test_the_triton_kernel_of_rms_norm(
    shape: tuple[int, ...], dtype: torch.dtype, triton_device: str
) -> None:
    x, weight = (random(*s, dtype=dtype, device=triton_device) for s in (shape, shape[-1:]))
    actual = rms_norm_triton(poisoned(x), weight, 1e-6)
    assert_within_two_roundings(actual, rms_norm_reference(x, weight, 1e-6))


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 96), (7, 33), (2, 64)])
@pytest.mark.parametrize("max_tile", [8192, 16], ids=["one tile", "several tiles"])
def test_the_triton_kernel_of_add_rms_norm(
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
