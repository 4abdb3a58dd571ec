"""Packed weights for the tests of linear layers."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.linear import PackedWeight
from baton_kernels.linear.packed import Implementation


def packed(weight: torch.Tensor, implementation: Implementation) -> PackedWeight:
    if implementation == "cpp" and cpu.OPS is None:
        pytest.skip(f"no compiled operations: {cpu.DESCRIPTION}")
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if implementation == "onednn" and weight.dtype is torch.bfloat16 and not has_bf16:
        pytest.skip("oneDNN does not multiply in bfloat16 on this processor")
    return PackedWeight(weight, implementation)
