"""Quantized weights: their rounding, and products of any input."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.linear import QuantizedWeight, linear, quantized
from baton_kernels.linear.quantized import Bits
from baton_kernels.linear.reference import (
    dequantize_reference,
    linear_reference,
    round_to_int8_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (1, 300)])
def test_int8_weights_are_the_nearest_multiples_of_a_scale_per_output(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = (torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]).to(dtype)
    values, scales = QuantizedWeight(weight, 8).parts()
    scales = scales.double()[:, None]
    error = (values.double() * scales - weight.double()).abs()
    assert (error <= scales * 0.5 * (1 + 1e-5)).all()
    assert values.abs().amax(1).min() == 127, "every output uses the whole range"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (1, 300)])
def test_int4_weights_are_closer_than_with_the_scale_of_the_largest_element(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = (torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]).to(dtype)
    values, scales = QuantizedWeight(weight, 4).parts()
    assert (values.dtype, values.min() >= -8, values.max() <= 7) == (torch.int8, True, True)
    groups = torch.nn.functional.pad(weight.double(), (0, -inputs % 32)).unflatten(1, (-1, 32))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    plain = (groups / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
    dequantized = dequantize_reference(values, scales).double()
    rounded = torch.nn.functional.pad(dequantized, (0, -inputs % 32)).unflatten(1, (-1, 32))
    # A scale in bfloat16 is off by up to 1/256.
    bound = (plain - groups).norm() + groups.norm() / 256
    assert (rounded - groups).norm() <= bound


@pytest.fixture(params=["cpp", "torch"])
def quantized_implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Run a test with compiled products and without."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "OPS", None)
        monkeypatch.setattr(quantized, "TILE_NUMEL", 1000)  # several tiles, the last one smaller
    elif cpu.OPS is None:
        pytest.skip(f"no compiled operations: {cpu.DESCRIPTION}")
    return str(request.param)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1), (1, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_the_product_of_quantized_weights_is_that_of_the_rounded_numbers(
    bits: Bits,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    has_bias: bool,
    quantized_implementation: str,
) -> None:
    weight = QuantizedWeight(torch.randn(outputs, inputs) / inputs**0.5, bits)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    tolerance = TOLERANCE.get(dtype, 2e-3)
    for num_rows in (0, 1, 2, 3, 4, 17, 100):
        x = torch.randn(num_rows, inputs).to(dtype)
        rounded = round_to_int8_reference(x) if quantized_implementation == "cpp" else x.double()
        expected = linear_reference(rounded, dequantize_reference(*weight.parts()), bias)
        actual = linear(x, weight, bias)
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.skipif(cpu.OPS is None, reason="only the compiled product rounds x")
def test_rounding_x_to_int8_changes_a_product_less_than_rounding_the_weight(bits: Bits) -> None:
    x, exact = torch.randn(20, 768), torch.randn(300, 768) / 768**0.5
    weight = QuantizedWeight(exact, bits)
    expected, with_weight = x @ exact.T, x @ dequantize_reference(*weight.parts()).T
    by_weight = (with_weight - expected).square().mean().sqrt()
    by_x = (linear(x, weight) - with_weight).square().mean().sqrt()
    assert 0 < by_x < by_weight < (0.01 if bits == 8 else 0.1)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_can_be_rebuilt_from_their_parts(
    bits: Bits, quantized_implementation: str
) -> None:
    weight = QuantizedWeight(torch.randn(70, 45), bits)
    parts = weight.parts()
    again = QuantizedWeight.from_parts(*parts)
    assert torch.equal(again.data, weight.data)
    assert torch.equal(again.scales, weight.scales)
    x = torch.randn(5, 45)
    assert torch.equal(linear(x, again), linear(x, weight))
    empty = QuantizedWeight.new_parts(weight.shape, bits)
    assert [(part.shape, part.dtype) for part in empty] == [
        (part.shape, part.dtype) for part in parts
    ]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.skipif(cpu.OPS is None, reason="torch's products depend on the number of rows")
def test_a_row_of_x_has_the_same_quantized_product_beside_any_other_rows(bits: Bits) -> None:
    weight, x = QuantizedWeight(torch.randn(200, 96), bits), torch.randn(300, 96)
    together = linear(x, weight)
    for start, end in ((0, 1), (3, 8), (7, 150)):
        assert torch.equal(linear(x[start:end], weight), together[start:end])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_zero_row_stays_zero_when_it_is_quantized(
    bits: Bits, quantized_implementation: str
) -> None:
    weight = QuantizedWeight(torch.tensor([[0.0] * 16, [1.0] * 16]), bits)
    assert linear(torch.full((1, 16), 2.0), weight).tolist() == [[0.0, 32.0]]
    assert linear(torch.zeros(1, 16), weight).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_quantized_weights_keep_nan_and_infinity_in_their_outputs(
    bits: Bits, broken: float, quantized_implementation: str
) -> None:
    weight = torch.rand(3, 33)
    weight[1, 32] = broken
    y = linear(torch.rand(7, 33), QuantizedWeight(weight, bits))
    assert y.isfinite().all(0).tolist() == [True, False, True]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_accept_inputs_of_any_shape(
    bits: Bits, quantized_implementation: str
) -> None:
    weight = QuantizedWeight(torch.randn(8, 32), bits)
    x = torch.randn(3, 2, 64)[..., ::2]  # not contiguous
    flat = linear(x.reshape(6, 32), weight)
    torch.testing.assert_close(linear(x, weight), flat.view(3, 2, 8))
    torch.testing.assert_close(linear(x[0, 0], weight), flat[0])
