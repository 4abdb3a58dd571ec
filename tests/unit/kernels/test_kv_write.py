"""KV write: new rows are written to their slots of one layer, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.kv_write import write_kv
from baton_kernels.kv_write.reference import write_kv_reference
from baton_kernels.kv_write.triton_kernel import write_kv_triton
from support.kernels.paged_cases import dtypes, layer_views

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

NUM_BLOCKS, BLOCK_SIZE = 7, 8


def write_kv_without_compiler(*arguments: Tensor) -> None:
    with patch.object(cpu, "OPS", None):
        write_kv(*arguments)  # type: ignore[arg-type]  # five tensors


@pytest.mark.parametrize("write", [write_kv, write_kv_without_compiler, write_kv_triton])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim"), [(1, 1, 16), (13, 2, 24), (31, 3, 40)]
)
def test_rows_are_written_to_their_slots(
    write: Callable[..., None],
    dtype: torch.dtype,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    triton_device: str,
) -> None:
    kv_cache = torch.full(
        (NUM_BLOCKS, num_kv_heads, 3, 2, BLOCK_SIZE, head_dim), float("nan"), dtype=dtype
    )
    kv_cache = kv_cache.to(triton_device)
    # Strided views, like those of a fused QKV projection.
    qkv = torch.randn(num_tokens, 3, num_kv_heads, head_dim, device=triton_device).to(dtype)
    key, value = qkv[:, 1], qkv[:, 2]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].to(triton_device)
    slots[num_tokens // 2] = -1

    write(key, value, *layer_views(kv_cache, layer=1), slots)

    expected = torch.full_like(kv_cache, float("nan"))
    write_kv_reference(key, value, *layer_views(expected, layer=1), slots)
    torch.testing.assert_close(kv_cache, expected, atol=0, rtol=0, equal_nan=True)


def test_writing_no_tokens_changes_nothing(triton_device: str) -> None:
    kv_cache = torch.zeros(NUM_BLOCKS, 2, 1, 2, BLOCK_SIZE, 16, device=triton_device)
    none = torch.empty(0, 2, 16, device=triton_device)
    write_kv_triton(
        none,
        none,
        *layer_views(kv_cache, 0),
        torch.empty(0, dtype=torch.int64, device=triton_device),
    )
    assert not kv_cache.any()
