"""Block copies take effect in the order of the pairs, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.block_copy import _adjacent_runs, _chains, copy_blocks, swap_blocks
from baton_kernels.block_copy.reference import copy_blocks_reference, swap_blocks_reference
from baton_kernels.block_copy.triton_kernel import copy_blocks_triton
from support.kernels.launch_constants import launch_constants

NUM_BLOCKS = 11


def make_cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a cache of odd sizes with some NaN, which a copy must preserve."""
    cache = torch.randn(num_blocks, 3, 5, 2, 8, 24).to(dtype)
    cache[:, :, :, :, -1] = float("nan")
    return cache


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=0, rtol=0, equal_nan=True)


DISTINCT = [(3, 0), (3, 7), (10, 1), (4, 2)]
# An overwritten source, a copied copy, a target that is written twice.
CHAINED = [(3, 0), (5, 3), (3, 6), (1, 6), (6, 9)]


@pytest.mark.parametrize("pairs", [DISTINCT, CHAINED, []], ids=["distinct", "chained", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_copies_take_effect_in_order(
    pairs: list[tuple[int, int]], dtype: torch.dtype, triton_device: str
) -> None:
    cache = make_cache(NUM_BLOCKS, dtype).to(triton_device)
    expected = cache.clone()
    table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    copy_blocks(cache, table)
    copy_blocks_reference(expected, table)
    assert_same(cache, expected)


# Swapped blocks and a block that is copied to itself.
SHUFFLED = [(4, 10), (10, 2), (2, 4), (0, 0), (7, 8), (8, 9), (2, 9)]


@pytest.mark.parametrize(
    "pairs", [DISTINCT, CHAINED, SHUFFLED, []], ids=["distinct", "chained", "shuffled", "none"]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.uint8, torch.float8_e4m3fn], ids=str
)
def test_one_launch_copies_blocks_in_order(
    pairs: list[tuple[int, int]], dtype: torch.dtype, triton_device: str
) -> None:
    cache = torch.randn(NUM_BLOCKS, 3, 5, 7).to(dtype).to(triton_device)
    expected = cache.clone()
    table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    with launch_constants({"tile": 64}):
        copy_blocks_triton(cache, cache, _chains(table))
    copy_blocks_reference(expected, table)
    assert_same(cache.float(), expected.float())


def test_two_chains_never_share_a_written_block() -> None:
    assert _chains(torch.tensor(DISTINCT)) == [[pair] for pair in DISTINCT]
    chains = _chains(torch.tensor(SHUFFLED))
    assert chains == [[(4, 10), (10, 2), (2, 4), (7, 8), (8, 9), (2, 9)], [(0, 0)]]


def test_one_launch_copies_between_caches(triton_device: str) -> None:
    source, target = make_cache(NUM_BLOCKS).to(triton_device), make_cache(6)
    if source.is_cuda:
        target = target.pin_memory()
    expected = target.clone()
    pairs = [(9, 0), (2, 3), (4, 5)]
    copy_blocks_triton(source, target, [[pair] for pair in pairs])
    if source.is_cuda:
        torch.cuda.synchronize()
    swap_blocks_reference(source, expected, torch.tensor(pairs))
    assert_same(target, expected)


def test_blocks_swap_out_and_in(triton_device: str) -> None:
    device, host = make_cache(NUM_BLOCKS).to(triton_device), make_cache(6)
    if device.is_cuda:
        host = host.pin_memory()
    original, expected_host = device.clone(), host.clone()
    out = torch.tensor([(9, 0), (2, 3), (3, 4), (4, 5)])  # three pairs are adjacent
    swap_blocks(device, host, out)
    if device.is_cuda:
        torch.cuda.synchronize()
    swap_blocks_reference(device, expected_host, out)
    assert_same(host, expected_host)

    device.zero_()
    swap_blocks(host, device, out.flip(1))
    expected = torch.zeros_like(original)
    expected[[9, 2, 3, 4]] = original[[9, 2, 3, 4]]
    assert_same(device, expected)


def test_adjacent_blocks_are_one_transfer() -> None:
    pairs = torch.tensor([(9, 0), (2, 3), (3, 4), (4, 5), (5, 7), (6, 8)])
    assert list(_adjacent_runs(pairs)) == [(9, 0, 1), (2, 3, 3), (5, 7, 2)]
    assert list(_adjacent_runs(pairs[:0])) == []


def test_unsuitable_caches_and_pairs_are_refused() -> None:
    cache, pairs = make_cache(4), torch.tensor([(0, 1)])
    with pytest.raises(ValueError, match="blocks differ"):
        swap_blocks(cache, cache.half(), pairs)
    with pytest.raises(ValueError, match="must be contiguous"):
        copy_blocks(cache[:, :, 1:], pairs)
    with pytest.raises(ValueError, match="int64"):
        copy_blocks(cache, pairs.int())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_swapping_to_unpinned_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="pinned"):
        swap_blocks(make_cache(4).cuda(), make_cache(4), torch.tensor([(0, 1)]))
