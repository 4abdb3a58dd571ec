"""KV blocks: who holds them, what stays findable, what is evicted first."""

from __future__ import annotations

import pytest

from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.request import Request
from baton_engine.protocol.block_hash import hash_block, hash_blocks, root_hash
from baton_engine.protocol.messages import EngineCoreRequest
from baton_engine.protocol.sampling import SamplingParams

BLOCK = 4


def make_request(tokens: list[int], salt: str = "") -> Request:
    return Request(EngineCoreRequest("r", tokens, SamplingParams(), cache_salt=salt))


def manager(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, "model", enable_prefix_caching=enable_prefix_caching)


def run(kv: KVCacheManager, tokens: list[int], salt: str = "") -> Request:
    """A request that was computed and still holds its blocks."""
    request = make_request(tokens, salt)
    assert kv.allocate(request, len(tokens)) is not None
    kv.cache_blocks(request, len(tokens))
    return request


def test_a_request_gets_just_the_blocks_its_tokens_need():
    kv = manager()
    request = make_request(list(range(9)))
    assert len(kv.allocate(request, 9) or []) == 3
    assert kv.allocate(request, 12) == []
    assert len(kv.allocate(request, 13) or []) == 1
    assert kv.pool.num_free_blocks == 4


def test_a_failed_allocation_changes_nothing():
    kv = manager(num_blocks=2)
    request = make_request(list(range(9)))
    assert kv.allocate(request, 9) is None
    assert request.blocks == []
    assert kv.pool.num_free_blocks == 2


def test_full_blocks_of_an_ended_request_are_found_again_and_shared():
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


def test_reviving_cached_free_blocks_counts_against_the_free_ones():
    kv = manager(num_blocks=3)
    kv.free(run(kv, list(range(8))))
    request = make_request(list(range(16)))
    cached = kv.find_cached_prefix(request, 15)
    assert len(cached) == 2
    assert kv.allocate(request, 16, cached) is None  # 2 revived + 2 new, but only 3 blocks in all
    assert kv.pool.num_free_blocks == 3


def test_blocks_that_were_not_computed_are_not_found():
    kv = manager()
    request = make_request(list(range(8)))
    kv.allocate(request, 8)
    kv.cache_blocks(request, 7)
    assert len(kv.find_cached_prefix(make_request(list(range(8))), 8)) == 1


def test_salts_and_switched_off_caching_share_nothing():
    kv = manager()
    run(kv, list(range(8)), salt="a")
    assert kv.find_cached_prefix(make_request(list(range(8)), salt="b"), 8) == []
    off = manager(enable_prefix_caching=False)
    run(off, list(range(8)))
    assert off.find_cached_prefix(make_request(list(range(8))), 8) == []


def test_uncached_blocks_go_first_then_the_least_recently_used_tail():
    kv = manager(num_blocks=4)
    first = run(kv, list(range(8)))
    second = run(kv, list(range(100, 106)))  # one full block, one partial
    first_ids, second_ids = first.block_ids, second.block_ids
    kv.free(first)
    kv.free(second)
    order = [kv.pool.allocate(1)[0].block_id for _ in range(4)]
    assert order == [second_ids[1], first_ids[1], first_ids[0], second_ids[0]]


def test_an_evicted_block_is_not_found_any_more():
    kv = manager(num_blocks=2)
    kv.free(run(kv, list(range(8))))
    kv.pool.allocate(1)
    assert len(kv.find_cached_prefix(make_request(list(range(8))), 8)) == 1


def test_reset_forgets_content_but_not_holders():
    kv = manager()
    request = run(kv, list(range(8)))
    kv.reset_prefix_cache()
    assert kv.find_cached_prefix(make_request(list(range(8))), 8) == []
    kv.free(request)
    assert kv.pool.num_free_blocks == 8


def test_freeing_twice_is_an_error():
    kv = manager()
    blocks = kv.pool.allocate(1)
    kv.pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        kv.pool.free(blocks)


def test_hashes_are_those_of_the_protocol_and_grow_with_the_tokens():
    kv = manager()
    request = make_request(list(range(10)))
    root = root_hash("model", "")
    assert kv.block_hashes(request) == hash_blocks(root, list(range(10)), BLOCK)
    assert kv.block_hashes_until(request, 10)[2] == hash_block(kv.block_hashes(request)[1], [8, 9])
    assert kv.block_hashes_until(request, 8) == kv.block_hashes(request)
    request.token_ids += [10, 11]
    assert kv.block_hashes(request) == hash_blocks(root, list(range(12)), BLOCK)
