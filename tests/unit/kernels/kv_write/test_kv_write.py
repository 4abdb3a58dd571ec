"""KV write: new rows are written to their slots of one layer, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.kv_write import plan_write, write_kv
from baton_kernels.kv_write.reference import to_fp8, write_kv_reference
from baton_kernels.kv_write.triton_kernel import write_kv_triton
from support.kernels.paged_cases import dtypes, layer_views

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

NUM_BLOCKS, BLOCK_SIZE = 7, 8


def write_planned(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **scales: Tensor,
) -> None:
    plan = plan_write(key_cache, slot_mapping)
    write_kv(key, value, key_cache, value_cache, slot_mapping, plan, **scales)


def write_planned_without_compiler(*arguments: Tensor) -> None:
    with patch.object(cpu, "OPS", None):
        write_planned(*arguments)  # type: ignore[arg-type]  # five tensors


@pytest.mark.parametrize("write", [write_planned, write_planned_without_compiler, write_kv_triton])
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
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, :, 1, 0, slot % BLOCK_SIZE] = key[token]
            expected[slot // BLOCK_SIZE, :, 1, 1, slot % BLOCK_SIZE] = value[token]
    torch.testing.assert_close(kv_cache, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("write", [write_planned, write_kv_triton], ids=["dispatcher", "triton"])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_fp8_cache_holds_scaled_and_saturated_rows(
    write: Callable[..., None], scaled: bool, triton_device: str
) -> None:
    num_tokens, num_kv_heads, head_dim = 9, 3, 24
    cache = torch.zeros(NUM_BLOCKS, num_kv_heads, 2, 2, BLOCK_SIZE, head_dim, device=triton_device)
    cache = cache.to(torch.float8_e4m3fn)
    expected = cache.clone()
    scales: dict[str, torch.Tensor] = {}
    if scaled:
        powers = torch.tensor([0.5, 4.0, 1.0], device=triton_device)
        scales = {"key_scale": powers, "value_scale": powers.flip(0)}
    key, value = 30 * torch.randn(2, num_tokens, num_kv_heads, head_dim, device=triton_device)
    if triton_device == "cpu":
        # The interpreter rounds wrongly and has no NaN. These values need no rounding.
        key, value = to_fp8(key, None).float(), to_fp8(value, None).float()
    else:
        value[1, 1, 1] = float("nan")
    key[0, 0, :3] = torch.tensor([1e6, -1e6, 0.0])
    value[1, 1, 0] = float("inf")
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].to(triton_device)
    slots[4] = -1

    write(key, value, *layer_views(cache, layer=1), slots, **scales)

    write_kv_reference(key, value, *layer_views(expected, layer=1), slots, **scales)
    torch.testing.assert_close(cache.float(), expected.float(), atol=0, rtol=0, equal_nan=True)
    assert cache.float().nan_to_num(0).abs().max() == 448


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
