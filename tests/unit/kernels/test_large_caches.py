"""Every kernel addresses blocks past 2^31 elements, where int32 offsets would overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.attention import paged_attention
from baton_kernels.block_checksum.reference import word_sums_reference
from baton_kernels.block_checksum.triton_kernel import block_sums_triton
from baton_kernels.block_copy.triton_kernel import copy_blocks_triton
from baton_kernels.kv_write.triton_kernel import write_kv_triton
from baton_kernels.launch_configurations import Configuration
from support.kernels.launch_constants import launch_constants
from support.kernels.paged_cases import (
    assert_attends,
    large_memory,
    layer_views,
    paged_case,
)

SPLIT: Configuration = {"KV_TILE": 16, "PROGRAMS_PER_SM": 8, "num_warps": 4, "num_stages": 2}


def large_cache(num_elements: int, *block: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return a cache [num_blocks, *block] with more than `num_elements`."""
    size = torch.Size(block).numel()
    num_blocks = num_elements // size + 64
    return large_memory(num_blocks * size, dtype, device).view(num_blocks, *block)


@pytest.mark.parametrize(
    ("tokens", "max_seqlen_q", "config"),
    [(20, None, None), (300, 1, SPLIT)],
    ids=["whole", "split"],
)
def test_attention(
    tokens: int, max_seqlen_q: int | None, config: Configuration | None, triton_device: str
) -> None:
    case = paged_case([(1, tokens)], 16, 8, 128, dtype=torch.float16)
    cache = large_cache(2**31, 8, 1, 2, 16, 128, dtype=torch.float16, device=triton_device)
    blocks = case.block_tables[0, : -(-tokens // 16)].tolist()
    table = torch.arange(len(cache) - len(blocks), len(cache), dtype=torch.int32).flip(0)[None]
    for theirs, ours in zip(table[0].tolist(), blocks, strict=True):
        cache[theirs, :, 0, 0] = case.key_cache[ours].to(triton_device)
        cache[theirs, :, 0, 1] = case.value_cache[ours].to(triton_device)
    moved = case.to(triton_device)
    moved.key_cache, moved.value_cache = layer_views(cache, layer=0)
    moved.block_tables = table.to(triton_device)
    with launch_constants(config):
        arguments = moved.arguments(max_seqlen_q, "triton")
    assert_attends(paged_attention(*arguments), case)


def test_kv_write(triton_device: str) -> None:
    cache = large_cache(2**31, 2, 1, 2, 16, 64, dtype=torch.float16, device=triton_device)
    cache[-1] = 0
    key, value = torch.randn(2, 3, 2, 64, device=triton_device).half()
    slots = len(cache) * 16 - torch.tensor([1, 5, 16], device=triton_device)
    write_kv_triton(key, value, *layer_views(cache, layer=0), slots)
    expected = torch.zeros_like(cache[-1])
    for token, slot in enumerate((15, 11, 0)):
        expected[:, 0, 0, slot], expected[:, 0, 1, slot] = key[token], value[token]
    assert torch.equal(cache[-1], expected)


def test_block_copy(triton_device: str) -> None:
    cache = large_cache(2**31, 2**15, dtype=torch.int64, device=triton_device)
    cache[1] = torch.arange(2**15)
    copy_blocks_triton(cache, cache, [[(1, len(cache) - 1), (len(cache) - 1, len(cache) - 3)]])
    assert torch.equal(cache[-1], cache[1])
    assert torch.equal(cache[-3], cache[1])


def test_block_checksum(triton_device: str) -> None:
    cache = large_cache(2**31, 2, 2**14, dtype=torch.int64, device=triton_device)
    cache[-2] = torch.arange(2**15).view(2, -1)
    sums = block_sums_triton(cache, torch.tensor([len(cache) - 2]), 1, 1)
    assert sums.tolist() == word_sums_reference(cache[-2, 1:].cpu()).tolist()
