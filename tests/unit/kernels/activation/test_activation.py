"""The activation matches its formula, and the Triton kernel its reference."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.activation import silu_and_mul
from baton_kernels.activation.reference import silu_and_mul_reference
from baton_kernels.activation.triton_kernel import silu_and_mul_triton
from support.kernels.elementwise import poisoned, random
from support.kernels.paged_cases import dtypes


def test_silu_and_mul_splits_gate_from_up() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), expected)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (7, 66), (2, 3, 1300), (0, 8)], ids=str)
def test_the_triton_kernel_of_silu_and_mul(
    shape: tuple[int, ...], dtype: torch.dtype, triton_device: str
) -> None:
    gate_up = 4 * random(*shape, dtype=dtype, device=triton_device)
    # The kernel rounds once. The reference also rounds the activation.
    torch.testing.assert_close(
        silu_and_mul_triton(poisoned(gate_up)), silu_and_mul_reference(gate_up.float()).to(dtype)
    )
