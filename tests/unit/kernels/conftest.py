"""Fixtures of kernel tests. tests/conftest.py chooses where Triton kernels run.

Tests in this folder import only torch, triton, numpy and pytest, because `make gpu` runs them
on machines without other packages.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def triton_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN or the largest integer, to detect unwritten elements."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*arguments: object, **keywords: object) -> Tensor:
            tensor = allocate(*arguments, **keywords)
            return tensor.fill_(
                float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            )

        return allocate_poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
