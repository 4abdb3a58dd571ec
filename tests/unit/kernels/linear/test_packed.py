"""Weights packed for the CPU: bits, shapes and inputs."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.linear import linear, packing
from baton_kernels.linear.packed import Implementation
from support.kernels.packed_weights import packed


@pytest.mark.parametrize("implementation", ["cpp", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 31), (65, 128), (256, 1)])
def test_unpacking_restores_every_bit(
    implementation: Implementation, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight = torch.randn(outputs, 2 * inputs).to(dtype)[:, ::2]  # not contiguous
    form = packed(weight, implementation)
    assert (form.shape, form.dtype) == (weight.shape, dtype)
    assert torch.equal(form.unpack(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [96, 4000])  # one block of weights, several
def test_a_row_of_x_has_the_same_product_beside_any_other_rows(
    dtype: torch.dtype, inputs: int
) -> None:
    weight, x = torch.randn(200, inputs).to(dtype), torch.randn(300, inputs).to(dtype)
    form = packed(weight, "cpp")
    together = linear(x, form)
    for start, end in ((0, 1), (3, 8), (7, 150)):
        assert torch.equal(linear(x[start:end], form), together[start:end])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_keep_nan_and_infinity_in_their_outputs(
    dtype: torch.dtype, broken: float
) -> None:
    weight = torch.rand(3, 33).to(dtype)
    weight[1, 32] = broken
    y = linear(torch.rand(7, 33).to(dtype), packed(weight, "cpp"))
    assert y.isfinite().all(0).tolist() == [True, False, True]


def test_packed_weights_accept_inputs_of_any_shape() -> None:
    form = packed(torch.randn(8, 32), "cpp")
    x = torch.randn(3, 2, 64)[..., ::2]  # not contiguous
    flat = linear(x.reshape(6, 32), form)
    assert torch.equal(linear(x, form), flat.view(3, 2, 8))
    assert torch.equal(linear(x[0, 0], form), flat[0])


def test_packed_weights_refuse_other_shapes_and_dtypes() -> None:
    form = packed(torch.randn(8, 32), "cpp")
    with pytest.raises(RuntimeError, match="does not have 8 outputs of 31 inputs"):
        linear(torch.randn(1, 31), form)
    with pytest.raises(RuntimeError, match="the packed weight must be contiguous and of dtype"):
        linear(torch.randn(1, 32, dtype=torch.bfloat16), form)
    with pytest.raises(RuntimeError, match="bias must have the shape"):
        linear(torch.randn(1, 32), form, torch.randn(7))


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
@pytest.mark.parametrize("rows", [1024, 1025, 2047])  # whole huge pages, a rest, almost two pages
def test_a_large_packed_weight_starts_at_a_huge_page(rows: int) -> None:
    weight = torch.randn(rows, 512)
    form = packed(weight, "cpp")
    assert form.data.data_ptr() % 2**21 == 0
    assert torch.equal(form.unpack(), weight)


def test_only_float32_and_bfloat16_on_a_cpu_are_packed() -> None:
    assert packing(torch.float32, torch.device("cpu")) is not None
    assert packing(torch.float16, torch.device("cpu")) is None
    assert packing(torch.float32, torch.device("meta")) is None
