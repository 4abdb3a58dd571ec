"""MoE routing: the top k without a sort, and the alignment of pairs to tiles."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.moe.reference import route_top_k_reference
from baton_kernels.moe.routing_triton import align_pairs, max_num_tiles, route_top_k_triton
from support.kernels.launch_constants import launch_constants

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

ROWS = {"ROWS": 4, "num_warps": 2}


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(0, 8, 2), (1, 4, 2), (13, 8, 3), (5, 6, 6), (3, 129, 8), (2, 512, 16)],
)
def test_routing_is_the_top_k_of_the_softmax(
    num_tokens: int, num_experts: int, top_k: int, renormalize: bool, triton_device: str
) -> None:
    logits = torch.randn(num_tokens, num_experts)
    expected_weights, expected_ids = route_top_k_reference(logits, top_k, renormalize)
    for config in (None, ROWS):
        with launch_constants(config):
            weights, expert_ids = route_top_k_triton(logits.to(triton_device), top_k, renormalize)
        torch.testing.assert_close(weights.cpu(), expected_weights)
        assert torch.equal(expert_ids.cpu(), expected_ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_routed_in_float32(dtype: torch.dtype, triton_device: str) -> None:
    logits = (torch.randperm(7 * 16).view(7, 16) / 16).to(dtype)  # all distinct
    expected_weights, expected_ids = route_top_k_reference(logits, 4, True)
    weights, expert_ids = route_top_k_triton(logits.to(triton_device), 4, True)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.cpu(), expected_weights)
    assert torch.equal(expert_ids.cpu(), expected_ids)


def test_the_lowest_experts_of_equal_logits_are_chosen(triton_device: str) -> None:
    weights, expert_ids = route_top_k_triton(torch.zeros(2, 6, device=triton_device), 3, True)
    assert expert_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


def test_excluded_experts_are_chosen_last_and_never_twice(triton_device: str) -> None:
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 2.0, float("-inf")]])
    weights, expert_ids = route_top_k_triton(logits.to(triton_device), 4, True)
    assert expert_ids.tolist() == [[3, 1, 0, 2]]
    assert weights[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_nan_or_infinite_logit_affects_only_its_token(
    bad: float, renormalize: bool, triton_device: str
) -> None:
    logits = torch.randn(3, 6)
    logits[1, 4] = bad
    with launch_constants(ROWS):
        weights, expert_ids = route_top_k_triton(logits.to(triton_device), 2, renormalize)
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]
    assert bool(((expert_ids >= 0) & (expert_ids < 6)).all())


def test_logits_may_be_a_view(triton_device: str) -> None:
    logits = torch.randn(4, 20, device=triton_device)
    for view in (logits[:, 3:9], logits.T):
        expected = route_top_k_reference(view, 2, False)
        assert torch.equal(route_top_k_triton(view, 2, False)[1], expected[1])


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "block_m"),
    [
        (1, 3, 2, 16),
        (17, 4, 3, 16),
        (65, 9, 2, 32),
        (140, 2, 1, 64),
        (2100, 3, 2, 64),  # more pairs than a chunk
    ],
)
def test_alignment_gives_every_expert_whole_tiles_in_order(
    num_tokens: int, num_experts: int, top_k: int, block_m: int, triton_device: str
) -> None:
    expert_ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k))
    sorted_pairs, tile_experts, num_padded = align_pairs(
        expert_ids.to(triton_device), num_experts, block_m
    )
    expected_pairs: list[int] = []
    expected_experts: list[int] = []
    for expert in range(num_experts):
        pairs = (expert_ids.flatten() == expert).nonzero()[:, 0].tolist()
        num_tiles = -(-len(pairs) // block_m)
        expected_pairs += pairs + [num_tokens * top_k] * (num_tiles * block_m - len(pairs))
        expected_experts += [expert] * num_tiles
    assert num_padded.tolist() == [len(expected_pairs)]
    assert sorted_pairs[: len(expected_pairs)].tolist() == expected_pairs
    assert tile_experts[: len(expected_experts)].tolist() == expected_experts
    assert (
        len(tile_experts)
        == max_num_tiles(num_tokens * top_k, num_experts, block_m)
        >= len(expected_experts)
    )


def test_the_maximum_number_of_tiles_is_limited_by_the_pairs() -> None:
    assert max_num_tiles(num_pairs=8, num_experts=128, block_m=16) == 8
    assert max_num_tiles(num_pairs=1024, num_experts=8, block_m=16) == 71
