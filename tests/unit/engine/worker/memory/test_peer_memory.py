"""The memory that peers access: the KV cache itself, or slots that hold copies of its blocks.

A tensor on the CPU stands in for a GPU's KV cache.
"""

from __future__ import annotations

import pytest
import torch

from baton_engine.worker.memory.peer_memory import PeerMemory
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout

LAYOUT = KVCacheLayout(
    num_blocks=7,
    num_kv_heads=3,
    num_layers=2,
    block_size=5,
    head_dim=4,
    dtype="float32",
    first_kv_head=6,
    total_kv_heads=12,
)


def make_cache(seed: int) -> torch.Tensor:
    return torch.randn((7, 3, 2, 2, 5, 4), generator=torch.Generator().manual_seed(seed))


def staged_memory(cache: torch.Tensor, num_slots: int = 4) -> PeerMemory:
    return PeerMemory(cache, LAYOUT, num_slots * LAYOUT.block_nbytes + 1, staged=True)


def test_peers_access_a_cache_in_host_memory_directly() -> None:
    cache = make_cache(1)
    memory = PeerMemory(cache, LAYOUT, 0).memory
    assert (memory.base_address, memory.num_slots) == (cache.data_ptr(), 7)
    assert memory.expose([5, 2]) == [5, 2]


@pytest.mark.parametrize("heads", [HeadRange(6, 3), HeadRange(6, 1), HeadRange(7, 2)])
def test_checksums_of_slots_equal_those_of_their_blocks(heads) -> None:
    cache = make_cache(2)
    slots = staged_memory(cache)
    taken = slots.memory.expose([6, 0, 3])
    through_slots = slots.memory.block_sums(taken, heads)
    direct = PeerMemory(cache, LAYOUT, 0).memory.block_sums([6, 0, 3], heads)
    assert through_slots.tolist() == direct.tolist()
    cache.zero_()
    assert slots.memory.block_sums(taken, heads).tolist() == direct.tolist(), "a slot is a copy"


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(HeadRange(6, 3), [0, 1, 2]), (HeadRange(7, 1), [1]), (HeadRange(7, 2), [1, 2])],
)
def test_commit_writes_only_the_given_heads_of_the_given_blocks(heads, rows) -> None:
    source, cache = make_cache(3), make_cache(4)
    before = cache.clone()
    slots = staged_memory(cache)
    taken = slots.memory.accept([4, 1])
    slots._slots[taken] = source[[4, 1]]  # a peer writes the slots
    slots.memory.commit(taken, [4, 1], heads)
    expected = before.clone()
    for block in (4, 1):
        expected[block, rows] = source[block, rows]
    assert torch.equal(cache, expected)


def test_staging_has_no_more_slots_than_blocks_and_must_hold_one_block() -> None:
    cache = make_cache(5)
    assert staged_memory(cache, 100).memory.num_slots == 7
    assert staged_memory(cache, 2).memory.num_slots == 2
    with pytest.raises(ValueError, match=r"raise kv_transfer\.staging_bytes"):
        PeerMemory(cache, LAYOUT, LAYOUT.block_nbytes - 1, staged=True)
