"""Sequences that are split into segments.

For the tests of split KV and of the launch plan.
"""

from __future__ import annotations

import pytest
import torch

from baton_kernels.attention import split_kv_triton, triton_kernel
from baton_kernels.attention.split_kv_triton import Partials
from baton_kernels.kernel_arguments import Heads
from support.kernels.paged_cases import PagedCase, assert_attends, triton_output

TILE = 16
MANY = {"KV_TILE": TILE, "PROGRAMS_PER_SM": 8, "num_warps": 4, "num_stages": 2}


def segments_of(case: PagedCase, config: dict[str, int], device: str) -> list[int]:
    """Return the number of segments of each sequence, as the kernel reported it."""
    reported = []

    class Reduce:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(
                out: Heads, partials: Partials, cu_seqlens_q: torch.Tensor, **constants: int
            ) -> None:
                reported.append(partials.segments_ptr[:, 1].tolist())
                split_kv_triton.join_segments_kernel[grid](out, partials, cu_seqlens_q, **constants)

            return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernel, "join_segments_kernel", Reduce())
        longest = int(case.cu_seqlens_q.diff().max())
        assert_attends(triton_output(case, device, max_seqlen_q=longest, config=config), case)
    return reported[0] if reported else [1] * len(case.seq_lens)
