"""Inputs of the elementwise Triton kernels, and comparisons with their references.

For the tests of activation, norm and rope.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
