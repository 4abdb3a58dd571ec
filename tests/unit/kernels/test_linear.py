"""Linear layers give equal products with packed weights, and close ones with int8 weights."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import linear as linear_module
from baton_kernels.linear import FEW_ROWS, Int8Weight, can_pack, linear, pack_weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_plain_and_packed_weights_give_the_product(
    dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (1, 300)])
def test_int8_weights_are_the_nearest_multiples_of_a_scale_per_output(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = (torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]).to(dtype)
    quantized = Int8Weight(weight)
    scales = quantized.scales.double()[:, None]
    # Half a step. The largest value also has the rounding error of the scale.
    error = (quantized.values.double() * scales - weight.double()).abs()
    assert (error <= scales * 0.5 * (1 + 2**-7)).all()
    assert quantized.values.abs().amax(1).min() >= 126, "every output uses the whole range"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (1, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("native_bf16", [False, True])
@torch.inference_mode()
def test_products_of_int8_weights_are_as_precise_as_bfloat16(
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    has_bias: bool,
    native_bf16: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        linear_module, "_tile_dtype", lambda: torch.bfloat16 if native_bf16 else torch.float32
    )
    monkeypatch.setattr(linear_module, "TILE_NUMEL", 1000)  # several tiles, the last one smaller
    weight = Int8Weight(torch.randn(outputs, inputs) / inputs**0.5)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    exact = weight.values.double() * weight.scales.double()[:, None]
    tolerance = TOLERANCE[torch.bfloat16]
    for num_rows in (0, 1, FEW_ROWS, FEW_ROWS + 1, 100):
        x = torch.randn(num_rows, inputs).to(dtype)
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        actual = linear(x, weight, bias)
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_zero_row_stays_zero_in_int8() -> None:
    weight = Int8Weight(torch.tensor([[0.0] * 16, [1.0] * 16]))
    assert linear(torch.full((1, 16), 2.0), weight).tolist() == [[0.0, 32.0]]


def test_int8_weights_accept_inputs_of_any_shape() -> None:
    weight = Int8Weight(torch.randn(8, 32))
    x = torch.randn(3, 2, 64)[..., ::2]  # not contiguous
    flat = linear(x.reshape(6, 32), weight)
    torch.testing.assert_close(linear(x, weight), flat.view(3, 2, 8))
    torch.testing.assert_close(linear(x[0, 0], weight), flat[0])


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_intermediate_results_do_not_overflow_float16(has_bias: bool, num_rows: int) -> None:
    weight = Int8Weight(torch.full((3, 64), 0.01))
    x = torch.full((num_rows, 64), 100.0, dtype=torch.float16)
    bias = torch.zeros(3, dtype=torch.float16) if has_bias else None
    torch.testing.assert_close(
        linear(x, weight, bias), torch.full_like(x[:, :3], 64), atol=0, rtol=1e-2
    )


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_int8_weights_keep_nan_and_infinity_in_their_outputs(broken: float, num_rows: int) -> None:
    weight = torch.rand(3, 32)
    weight[1, 5] = broken
    y = linear(torch.rand(num_rows, 32), Int8Weight(weight))
    assert y.isfinite().all(0).tolist() == [True, False, True]


@pytest.mark.parametrize("num_rows", [FEW_ROWS, FEW_ROWS + 1])
def test_torch_compile_accepts_int8_weights(num_rows: int) -> None:
    weight, x = Int8Weight(torch.randn(8, 32)), torch.randn(num_rows, 32)
    compiled = torch.compile(lambda x: linear(x, weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), linear(x, weight))
