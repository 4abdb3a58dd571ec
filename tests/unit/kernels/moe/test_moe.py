"""Mixture of experts: every path matches the formula, also with idle and remote experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton_kernels.launch_configurations import Configuration
from baton_kernels.linear import PackedWeight, QuantizedWeight, Weight, linear, packing
from baton_kernels.linear.quantized import Bits
from baton_kernels.moe import route_top_k, run_experts
from baton_kernels.moe.experts_cpu import run_experts_cpu
from baton_kernels.moe.reference import run_experts_reference
from baton_kernels.moe.triton_kernel import (
    CANDIDATES,
    default_configuration,
    run_experts_triton,
    shape_class,
)
from support.kernels.launch_constants import launch_constants

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

GEMV: Configuration = {"BLOCK_M": 1, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4}
GEMM: Configuration = {
    **GEMV,
    "BLOCK_M": 16,
    "BLOCK_N": 64,
    "GROUP_M": 2,
    "SWAP": 0,
    "num_stages": 2,
}
SWAPPED = {**GEMM, "SWAP": 1}
NUM_EXPERTS = 5


def gemv(*arguments: Tensor) -> Tensor:
    with launch_constants(GEMV):
        return run_experts_triton(*arguments)


def gemm(*arguments: Tensor) -> Tensor:
    with launch_constants(GEMM):
        return run_experts_triton(*arguments)


def swapped_gemm(*arguments: Tensor) -> Tensor:
    with launch_constants(SWAPPED):
        return run_experts_triton(*arguments)


def packed(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Run with separate weights per expert, packed where the CPU can multiply by packed weights."""

    def separate(stacked: Tensor) -> list[Weight]:
        can_pack = packing(stacked.dtype, stacked.device) is not None
        return [PackedWeight(weight) if can_pack else weight for weight in stacked]

    return run_experts(x, separate(gate_up), separate(down), weights, expert_ids)


TRITON = [gemv, gemm, swapped_gemm]
ON_CPU = [packed, run_experts_cpu]


def make_case(
    num_tokens: int,
    top_k: int = 2,
    hidden: int = 40,
    intermediate: int = 36,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, gate_up, down, weights and expert ids. A token's experts are distinct."""
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up = (torch.randn(NUM_EXPERTS, 2 * intermediate, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(NUM_EXPERTS, hidden, intermediate) / intermediate**0.5).to(dtype)
    weights, expert_ids = route_top_k(torch.randn(num_tokens, NUM_EXPERTS), top_k, renormalize=True)
    return x, gate_up, down, weights.to(dtype), expert_ids


def device_of(run: Callable[..., Tensor], triton_device: str) -> str:
    return triton_device if run in TRITON else "cpu"


def check(
    run: Callable[..., Tensor],
    case: tuple[Tensor, ...],
    triton_device: str,
    tolerance: float = 1e-4,
) -> None:
    expected = run_experts_reference(*case)
    actual = run(*(tensor.to(device_of(run, triton_device)) for tensor in case)).cpu()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("run", [run_experts, run_experts_reference])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (13, 8, 3), (5, 6, 6)])
def test_the_reference_matches_the_formula(
    run: Callable[..., Tensor], num_tokens: int, num_experts: int, top_k: int, renormalize: bool
) -> None:
    hidden, intermediate = 12, 7
    x, logits = torch.randn(num_tokens, hidden), torch.randn(num_tokens, num_experts)
    gate_up, down = (
        torch.randn(num_experts, 2 * intermediate, hidden),
        torch.randn(num_experts, hidden, intermediate),
    )

    weights, expert_ids = route_top_k(logits, top_k, renormalize)
    actual = run(x, gate_up, down, weights, expert_ids)

    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        probs = logits[token].softmax(-1)
        chosen = probs.argsort(descending=True)[:top_k].tolist()
        total = sum(probs[e] for e in chosen) if renormalize else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ x[token]).split(intermediate)
            expected[token] += (
                probs[expert] / total * (down[expert] @ (torch.nn.functional.silu(gate) * up))
            )
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("run", "num_tokens"),
    [
        *((gemv, n) for n in (0, 1, 3)),
        *((run, n) for run in (gemm, swapped_gemm, *ON_CPU) for n in (0, 1, 3, 17, 65)),
    ],
)
def test_experts_return_the_weighted_sum(
    run: Callable[..., Tensor], num_tokens: int, triton_device: str
) -> None:
    check(run, make_case(num_tokens), triton_device)


@pytest.mark.parametrize("run", TRITON)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(32, 64, 1), (63, 17, 3), (100, 33, 5)]
)
def test_experts_of_any_width(
    run: Callable[..., Tensor], hidden: int, intermediate: int, top_k: int, triton_device: str
) -> None:
    check(run, make_case(2, top_k, hidden, intermediate), triton_device)


@pytest.mark.parametrize("run", TRITON)
def test_half_precision_is_summed_in_float32(
    run: Callable[..., Tensor], triton_device: str
) -> None:
    check(run, make_case(3, dtype=torch.float16), triton_device, tolerance=2e-3)


@pytest.mark.parametrize("run", TRITON)
def test_bfloat16_is_summed_in_float32(run: Callable[..., Tensor], triton_device: str) -> None:
    if triton_device == "cpu" and run is not gemv:
        pytest.skip("the interpreter multiplies bfloat16 bits as integers")
    check(run, make_case(3, dtype=torch.bfloat16), triton_device, tolerance=2e-2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 130])
def test_quantized_experts_have_the_products_of_their_rounded_weights(
    bits: Bits, dtype: torch.dtype, num_tokens: int
) -> None:
    x, gate_up, down, weights, expert_ids = make_case(num_tokens, hidden=48, intermediate=72)
    rounded = [[QuantizedWeight(weight, bits) for weight in stacked] for stacked in (gate_up, down)]
    identity = [torch.eye(stacked.shape[2]) for stacked in (gate_up, down)]
    dense = [
        torch.stack([linear(one, weight, None).T for weight in stacked])
        for one, stacked in zip(identity, rounded, strict=True)
    ]
    expected = run_experts_reference(x, *dense, weights, expert_ids)
    actual = run_experts(x.to(dtype), *rounded, weights.to(dtype), expert_ids)
    # x and the input of the second product are also rounded to int8.
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < 0.02


@pytest.mark.parametrize("run", [*TRITON, *ON_CPU])
def test_one_expert_can_get_all_tokens(run: Callable[..., Tensor], triton_device: str) -> None:
    x, gate_up, down, weights, expert_ids = make_case(17 if run is not gemv else 3, top_k=1)
    check(run, (x, gate_up, down, weights, torch.full_like(expert_ids, 3)), triton_device)


@pytest.mark.parametrize(
    ("run", "num_tokens"),
    [
        *((run, n) for run in TRITON for n in (1, 4)),
        *((run, n) for run in ON_CPU for n in (1, 4, 150)),
    ],
)
def test_a_remote_expert_adds_zero_even_if_its_weight_is_nan(
    run: Callable[..., Tensor], num_tokens: int, triton_device: str
) -> None:
    x, gate_up, down, weights, expert_ids = make_case(num_tokens)
    expert_ids[::2, 0] = -1
    expert_ids[::3, 1] = NUM_EXPERTS  # the id of another rank's expert
    weights[(expert_ids < 0) | (expert_ids >= NUM_EXPERTS)] = float("nan")
    check(run, (x, gate_up, down, weights, expert_ids), triton_device)


@pytest.mark.parametrize("run", [*TRITON, *ON_CPU])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_the_sum_without_local_experts_is_zero(
    run: Callable[..., Tensor], num_tokens: int, triton_device: str
) -> None:
    x, gate_up, down, weights, expert_ids = make_case(num_tokens)
    case = (x, gate_up, down, weights, torch.full_like(expert_ids, -1))
    device = device_of(run, triton_device)
    assert run(*(tensor.to(device) for tensor in case)).eq(0).all()


@pytest.mark.parametrize("run", [*TRITON, *ON_CPU])
def test_weights_of_idle_experts_are_not_read(
    run: Callable[..., Tensor], triton_device: str
) -> None:
    x, gate_up, down, weights, expert_ids = make_case(3)
    expert_ids[:, 0], expert_ids[:, 1] = 1, 3
    gate_up[[0, 2, 4]], down[[0, 2, 4]] = float("nan"), float("nan")
    check(run, (x, gate_up, down, weights, expert_ids), triton_device)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("run", [gemv, gemm, swapped_gemm])
def test_every_output_is_written(run: Callable[..., Tensor], triton_device: str) -> None:
    case = make_case(5, hidden=37, intermediate=19)
    case[4][::4, 1] = -1
    out = run(*(tensor.to(triton_device) for tensor in case))
    torch.testing.assert_close(out.cpu(), run_experts_reference(*case), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("run", TRITON)
def test_the_same_arguments_give_the_same_bits(
    run: Callable[..., Tensor], triton_device: str
) -> None:
    case = [tensor.to(triton_device) for tensor in make_case(4, top_k=4)]
    assert torch.equal(run(*case), run(*case))


def test_padding_does_not_read_neighbouring_rows(triton_device: str) -> None:
    """The input has fewer rows than a tile and lies between rows of NaN."""
    x, *rest = make_case(2)
    around = torch.full((9, x.shape[1]), float("nan"))
    around[3:5] = x
    view = around.to(triton_device)[3:5]
    expected = run_experts_reference(x, *rest)
    for run in TRITON:
        actual = run(view, *(tensor.to(triton_device) for tensor in rest)).cpu()
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_mismatched_stacked_weights_are_refused(triton_device: str) -> None:
    x, gate_up, down, weights, expert_ids = (tensor.to(triton_device) for tensor in make_case(3))
    with pytest.raises(ValueError, match="do not match"):
        run_experts_triton(x, gate_up[:, 2:], down, weights, expert_ids)
    with pytest.raises(ValueError, match="contiguous"):
        run_experts_triton(x, gate_up.mT.contiguous().mT, down, weights, expert_ids)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_default_configurations_give_the_right_result(num_tokens: int, triton_device: str) -> None:
    """40 tokens take the GEMM path, 1 token the GEMV path."""
    case = make_case(num_tokens)
    expected = run_experts_reference(*case)
    actual = run_experts_triton(*(tensor.to(triton_device) for tensor in case)).cpu()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_every_configuration_has_every_constant() -> None:
    names = set(CANDIDATES[0])
    defaults = [
        default_configuration(n, 128, 8, torch.bfloat16) for n in (1, 9, 64, 256, 1024, 8192)
    ]
    assert all(set(config) == names for config in [*CANDIDATES, *defaults])
    assert len({tuple(config.items()) for config in CANDIDATES}) == len(CANDIDATES)
    assert all(config in CANDIDATES for config in defaults)


def test_shape_classes_round_tokens_up() -> None:
    classes = [shape_class(n, 128, 8, 2048, 768, torch.bfloat16) for n in (33, 64, 65)]
    assert (
        classes[0]
        == classes[1]
        == "experts=128/top_k=8/hidden=2048/intermediate=768/bfloat16/tokens=64"
    )
    assert classes[2].endswith("tokens=128")
