"""Where the Triton kernels run; see tests/conftest.py for how that is chosen.

Only torch, triton, numpy and pytest may be imported in this folder: `make gpu` runs it on machines that have nothing else.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
