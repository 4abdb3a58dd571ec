"""Linear layers compute the same with plain and with packed weights."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.linear import can_pack, linear, pack_weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_plain_and_packed_weights_give_the_product(
    dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    x = torch.randn(num_rows, inputs).to(dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if not can_pack(weight):
        pytest.skip(f"oneDNN does not multiply in {dtype} on this processor")
    for form in (weight, pack_weight(weight)):
        actual = linear(x, form, bias).double()
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_half_precision_cannot_be_packed() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
