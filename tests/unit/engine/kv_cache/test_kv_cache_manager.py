"""KV blocks of requests: allocation, prefix cache, copy-on-write and swapping."""

from __future__ import annotations

import pytest

from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_protocol.block_hash import hash_block, root_hash
from baton_protocol.engine_messages import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
)
from support.engine.kv_blocks import BLOCK, make_request, manager, run
from support.engine.scheduling.block_hashes import hash_blocks


def test_a_request_gets_only_the_blocks_that_its_tokens_need() -> None:
    kv = manager()
    request = make_request(list(range(9)))
    for num_tokens, num_blocks in ((9, 3), (12, 3), (13, 4)):
        assert kv.allocate(request, num_tokens)
        assert len(request.blocks) == num_blocks
    assert kv.pool.num_free_blocks == 4


def test_full_blocks_of_an_ended_request_are_found_and_shared() -> None:
    kv = manager()
    first = run(kv, list(range(10)))
    kept = first.block_ids
    kv.free(first)
    second, third = make_request([*range(8), 99]), make_request([*range(8), 77])
    for request in (second, third):
        cached = kv.find_cached_prefix(request, request.num_tokens - 1)
        assert [block.block_id for block in cached] == kept[:2]
        kv.allocate(request, request.num_tokens, cached)
    assert [block.ref_count for block in second.blocks] == [2, 2, 1]
    kv.free(second)
    assert [block.ref_count for block in third.blocks] == [1, 1, 1]


def test_cached_free_blocks_that_are_reused_count_as_allocated() -> None:
    kv = manager(num_blocks=3)
    kv.free(run(kv, list(range(8))))
    request = make_request(list(range(16)))
    cached = kv.find_cached_prefix(request, 15)
    assert len(cached) == 2
    # 2 reused + 2 new, but the pool has only 3 blocks
    assert not kv.allocate(request, 16, cached)
    assert kv.pool.num_free_blocks == 3


def test_blocks_that_were_not_computed_are_not_found() -> None:
    kv = manager()
    request = make_request(list(range(8)))
    kv.allocate(request, 8)
    kv.cache_blocks(request, 7)
    assert len(kv.find_cached_prefix(make_request(list(range(8))), 8)) == 1


def test_other_salts_and_disabled_prefix_caching_find_no_blocks() -> None:
    kv = manager()
    run(kv, list(range(8)), salt="a")
    assert kv.find_cached_prefix(make_request(list(range(8)), salt="b"), 8) == []
    off = manager(enable_prefix_caching=False)
    run(off, list(range(8)))
    assert off.find_cached_prefix(make_request(list(range(8))), 8) == []


def test_block_hashes_follow_the_protocol_and_the_growth_of_the_tokens() -> None:
    kv = manager()
    request = make_request(list(range(10)))
    root = root_hash("model", "")
    assert kv.block_hashes(request) == hash_blocks(root, list(range(10)), BLOCK)
    assert kv.block_hashes_until(request, 10)[2] == hash_block(kv.block_hashes(request)[1], [8, 9])
    assert kv.block_hashes_until(request, 8) == kv.block_hashes(request)
    request.token_ids += [10, 11]
    assert kv.block_hashes(request) == hash_blocks(root, list(range(12)), BLOCK)


# --- copy-on-write


def fork(kv: KVCacheManager, parent: Request, num_tokens: int) -> Request:
    child = make_request(parent.token_ids[:num_tokens])
    kv.fork(parent, child, num_tokens)
    return child


def test_a_fork_shares_all_blocks_including_a_partial_one() -> None:
    kv = manager()
    parent = run(kv, list(range(10)))
    child = fork(kv, parent, 10)
    assert child.block_ids == parent.block_ids
    assert kv.num_free_blocks == 5
    kv.free(parent)
    assert kv.num_free_blocks == 5
    kv.free(child)
    assert kv.num_free_blocks == 8


def test_writers_copy_a_shared_block_but_the_last_holder_writes_in_place() -> None:
    kv = manager()
    parent = run(kv, list(range(10)))
    first, second = fork(kv, parent, 10), fork(kv, parent, 10)
    shared = parent.block_ids[2]
    for request in (first, parent):
        copies = kv.make_writable(request, 10, 11)
        assert copies == [(shared, request.block_ids[2])]
        assert kv.make_writable(request, 10, 12) == []
    assert kv.make_writable(second, 10, 11) == []
    assert second.block_ids[2] == shared
    assert len({request.block_ids[2] for request in (parent, first, second)}) == 3
    assert first.block_ids[:2] == second.block_ids[:2] == parent.block_ids[:2]


def test_a_write_to_an_inherited_cached_block_removes_it_from_the_prefix_cache() -> None:
    kv = manager()
    parent = run(kv, list(range(8)))
    child = fork(kv, parent, 6)
    kv.free(parent)
    assert kv.make_writable(child, 6, 8) == []  # the last holder needs no copy
    assert len(kv.find_cached_prefix(make_request(list(range(8))), 8)) == 1
    child.token_ids += [60, 70]
    kv.cache_blocks(child, 8)
    assert len(kv.find_cached_prefix(make_request([*range(6), 60, 70]), 8)) == 2


def test_a_fork_keeps_only_the_block_hashes_of_its_own_tokens() -> None:
    kv = manager()
    parent = run(kv, list(range(12)))
    child = make_request([*range(6), 99, 98])
    kv.fork(parent, child, 6)
    assert kv.block_hashes(child) == hash_blocks(root_hash("model"), child.token_ids, BLOCK)


def test_invalid_forks_and_writes_are_refused() -> None:
    kv = manager()
    parent = run(kv, list(range(8)))
    with pytest.raises(ValueError, match="holds 2 KV blocks"):
        fork(kv, parent, 9)
    with pytest.raises(ValueError, match="free it before"):
        kv.fork(parent, fork(kv, parent, 8), 8)
    with pytest.raises(ValueError, match="positions to 9 need 3"):
        kv.make_writable(parent, 8, 9)


# --- swapping


def test_a_group_keeps_its_shared_blocks_across_swapping() -> None:
    kv = KVCacheManager(8, BLOCK, "model", num_swap_blocks=4)
    parent = run(kv, list(range(10)))
    child = fork(kv, parent, 10)
    kv.make_writable(child, 10, 11)
    device = [*parent.block_ids, child.block_ids[2]]

    out = kv.swap_out([parent, child])
    assert [copy.source for copy in out] == device
    assert sorted(copy.target for copy in out) == [0, 1, 2, 3]
    assert parent.blocks == child.blocks == []
    assert (kv.num_free_blocks, kv.swap_pool.num_free_blocks) == (8, 0)

    back = kv.swap_in([parent, child])
    assert [copy.source for copy in back] == [copy.target for copy in out]
    assert [copy.target for copy in back] == [*parent.block_ids, child.block_ids[2]]
    assert [block.ref_count for block in child.blocks] == [2, 2, 1]
    assert parent.swapped_blocks == child.swapped_blocks == []
    assert kv.swap_pool.num_free_blocks == 4


def test_swapping_out_keeps_shared_blocks_on_the_device_and_cached_ones_findable() -> None:
    kv = KVCacheManager(8, BLOCK, "model", num_swap_blocks=4)
    parent = run(kv, list(range(10)))
    other = fork(kv, parent, 4)
    assert len(kv.swap_out([parent]) or []) == 3
    assert kv.num_free_blocks == 7
    assert [block.ref_count for block in other.blocks] == [1]
    assert len(kv.find_cached_prefix(make_request(list(range(10))), 9)) == 2


def test_swapping_twice_is_refused() -> None:
    kv = KVCacheManager(4, BLOCK, "model", num_swap_blocks=3)
    request = run(kv, list(range(8)))
    with pytest.raises(ValueError, match="on the device"):
        kv.swap_in([request])
    kv.swap_out([request])
    with pytest.raises(ValueError, match="swapped out already"):
        kv.swap_out([request])


# --- reserves, events, statistics


def test_an_allocation_keeps_a_reserve_free_unless_it_needs_no_blocks() -> None:
    kv = manager(num_blocks=4)
    request = make_request(list(range(12)))
    assert not kv.can_allocate(request, 12, keep_free=2)
    assert kv.can_allocate(request, 12, keep_free=1)
    assert kv.allocate(request, 12)
    assert kv.can_allocate(request, 12, keep_free=4)


def test_events_report_stored_removed_and_cleared_blocks() -> None:
    kv = KVCacheManager(2, BLOCK, "model", enable_events=True)
    root = root_hash("model", "salt")
    hashes = hash_blocks(root, list(range(8)), BLOCK)
    request = make_request(list(range(8)), "salt")
    kv.allocate(request, 8)
    kv.cache_blocks(request, 4)
    kv.cache_blocks(request, 8)
    assert kv.take_events() == [
        BlocksStored(hashes[:1], root, BLOCK),
        BlocksStored(hashes[1:], hashes[0], BLOCK),
    ]
    kv.free(request)
    assert kv.take_events() == []
    kv.allocate(make_request([7]), 1)
    kv.reset_prefix_cache()
    assert kv.take_events() == [BlocksRemoved(hashes[1:]), AllBlocksCleared()]


def test_one_event_reports_all_blocks_of_a_long_chunk() -> None:
    kv = KVCacheManager(4, BLOCK, "model", enable_events=True)
    run(kv, list(range(14)))
    root = root_hash("model")
    assert kv.take_events() == [
        BlocksStored(hash_blocks(root, list(range(12)), BLOCK), root, BLOCK)
    ]


def test_events_are_off_by_default() -> None:
    kv = manager()
    run(kv, list(range(14)))
    assert kv.take_events() == []


def test_freed_uncached_blocks_are_evicted_first_then_the_least_recently_used_tail() -> None:
    kv = manager(num_blocks=4)
    first = run(kv, list(range(8)))
    second = run(kv, list(range(100, 106)))  # one full block, one partial
    first_ids, second_ids = first.block_ids, second.block_ids
    kv.free(first)
    kv.free(second)
    order = [kv.pool.allocate(1)[0].block_id for _ in range(4)]
    assert order == [second_ids[1], first_ids[1], first_ids[0], second_ids[0]]


def test_a_reset_clears_the_prefix_cache_but_not_held_blocks() -> None:
    kv = manager()
    request = run(kv, list(range(8)))
    kv.reset_prefix_cache()
    assert kv.find_cached_prefix(make_request(list(range(8))), 8) == []
    kv.free(request)
    assert kv.pool.num_free_blocks == 8


def test_a_reset_does_not_clear_the_lookup_counts() -> None:
    kv = manager()
    kv.count_lookup(100, 100)
    kv.reset_prefix_cache()
    kv.count_lookup(10, 5)
    assert (kv.stats.queries, kv.stats.hits) == (110, 105)
