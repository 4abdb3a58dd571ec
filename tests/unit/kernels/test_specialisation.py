"""Arguments that vary between steps do not recompile a kernel. Compiling would delay requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.attention.split_kv_triton import join_segments_kernel
from baton_kernels.attention.triton_kernel import _paged_attention_kernel
from baton_kernels.block_checksum.triton_kernel import _block_sums_kernel, block_sums_triton
from baton_kernels.block_copy.triton_kernel import _copy_blocks_kernel, copy_blocks_triton
from baton_kernels.moe.gemm_triton import _combine_kernel, _down_kernel, _gate_up_kernel
from baton_kernels.moe.routing_triton import (
    _count_kernel,
    _place_kernel,
    _route_kernel,
    route_top_k_triton,
)
from baton_kernels.moe.triton_kernel import run_experts_triton
from baton_kernels.norm.triton_kernel import _rms_norm_kernel, add_rms_norm_triton
from baton_kernels.sampling import triton_kernel as sampling
from baton_kernels.sampling.triton_greedy import _greedy_kernel, greedy_triton
from support.kernels.launch_constants import launch_constants
from support.kernels.paged_cases import paged_case, triton_output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing"),
]

SIZES = [2, 1, 3, 16, 32, 33]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


class Params:
    temperature, top_k, top_p, min_p = 1.0, 5, 0.9, 0.0


def norm(size: int) -> None:
    add_rms_norm_triton(random(size, 64), random(size, 64), random(64), 1e-6)


def copy(size: int) -> None:
    cache = random(2 * size, 64)
    copy_blocks_triton(cache, cache, [[(2 * pair, 2 * pair + 1)] for pair in range(size)])


def checksum(size: int) -> None:
    block_sums_triton(random(64, 2, 32), torch.arange(size), 0, 2)


def sample(size: int) -> None:
    sampling.draw_tokens_triton(random(size, 300), [Params()] * size, range(size))
    greedy_triton(random(size, 300), 0)


def experts(size: int) -> None:
    config = {
        "BLOCK_M": 16,
        "BLOCK_N": 64,
        "BLOCK_K": 32,
        "GROUP_M": 2,
        "SWAP": 0,
        "num_warps": 4,
        "num_stages": 2,
    }
    routed = route_top_k_triton(random(size, 4), 2, True)
    with launch_constants(config):
        run_experts_triton(random(size, 32), random(4, 64, 32), random(4, 32, 32), *routed)


def attend(size: int) -> None:
    case = paged_case([(1, 700 + size)] * size, 4, 2, 16)  # long enough to be split
    triton_output(case, "cuda", max_seqlen_q=1)


@pytest.mark.parametrize(
    ("launch", "kernels"),
    [
        (norm, [_rms_norm_kernel]),
        (copy, [_copy_blocks_kernel]),
        (checksum, [_block_sums_kernel]),
        (
            sample,
            [sampling._block_maxima_kernel, sampling._bounds_kernel, sampling._collect_kernel],
        ),
        (sample, [sampling._draw_kernel, _greedy_kernel]),
        (
            experts,
            [
                _route_kernel,
                _count_kernel,
                _place_kernel,
                _gate_up_kernel,
                _down_kernel,
                _combine_kernel,
            ],
        ),
        (attend, [_paged_attention_kernel, join_segments_kernel]),
    ],
    ids=["norm", "block copy", "block checksum", "sampling", "draw", "experts", "attention"],
)
def test_batches_of_other_sizes_do_not_recompile(
    launch: Callable[[int], None], kernels: list[Any]
) -> None:
    def compiled() -> list[int]:
        torch.cuda.synchronize()
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    launch(SIZES[0])
    before = compiled()
    assert all(before)
    for size in SIZES[1:]:
        launch(size)
        assert compiled() == before, f"with {size} rows"
