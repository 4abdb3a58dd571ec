"""Where the Triton kernels run: natively on a GPU if there is one, else in Triton's interpreter on the CPU.

Only torch, triton, numpy and pytest may be imported in this folder: `make gpu` runs it on machines that have nothing else.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before its module is imported


@pytest.fixture(scope="session")
def triton_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
