"""Linear layers give equal products with plain and with packed weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from baton_kernels.linear import linear
from baton_kernels.linear.packed import Implementation
from baton_kernels.linear.reference import linear_reference
from support.kernels.packed_weights import packed

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("implementation", ["plain", "cpp", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 6, 7, 64, 95, 97, 300])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (32, 1000), (3073, 70)]
)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_plain_and_packed_weights_give_the_product(
    implementation: Literal["plain"] | Implementation,
    dtype: torch.dtype,
    num_rows: int,
    inputs: int,
    outputs: int,
    has_bias: bool,
) -> None:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    x = torch.randn(num_rows, inputs).to(dtype)
    expected = linear_reference(x, weight, bias)
    form = weight if implementation == "plain" else packed(weight, implementation)
    actual = linear(x, form, bias)
    assert actual.dtype is dtype
    torch.testing.assert_close(
        actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
