"""The launch plan of the Triton kernel: items, segments and programs."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.attention import triton_plan
from support.kernels.paged_cases import paged_case
from support.kernels.split_cases import MANY, segments_of

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

FEW = MANY | {"PROGRAMS_PER_SM": 1}


def launch_of(lengths: list[tuple[int, int]], max_seqlen_q: int | None) -> triton_plan.Launch:
    """Plan a launch on the meta device, whose tensors have no values."""
    case = paged_case(lengths, 8, 2, 64).to("meta")
    plan = case.arguments(max_seqlen_q, "triton")[3]
    assert plan.launch is not None
    return plan.launch


def test_a_prefill_has_an_item_per_query_block_and_sequence() -> None:
    launch = launch_of([(70, 70), (7, 300)], None)
    block_q = launch.constants["BLOCK_Q"]
    assert launch.shared["BLOCK_M"] == 4 * block_q
    assert launch.items == 2 + 77 // block_q
    assert not launch.constants["ONE_BLOCK"]
    assert launch.target_segments == 0
    assert launch.partials is None


def test_a_decode_has_an_item_per_segment() -> None:
    launch = launch_of([(1, 2000), (3, 90)], 3)
    assert launch.constants["ONE_BLOCK"]
    assert launch.target_segments > 0
    assert launch.items == 2 + launch.target_segments
    assert launch.max_queries == 3
    assert launch.partials.out_ptr.shape == (launch.items, 2, launch.shared["BLOCK_M"], 64)
    assert launch_of([(1, 60)], 1).items == 1


def test_the_number_of_programs_limits_the_segments(triton_device: str) -> None:
    case = paged_case([(1, 500), (1, 20), (1, 100)], 4, 2, 16)
    sms = triton_plan._num_sms(torch.device(triton_device))
    segments = segments_of(case, FEW, triton_device)
    assert segments[0] > 1
    assert sum(segments) <= sms // 2 + 3
