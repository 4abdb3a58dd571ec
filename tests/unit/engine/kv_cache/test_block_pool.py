"""The pool of KV blocks: eviction order, resets and references."""

from __future__ import annotations

import pytest

from support.engine.kv_blocks import make_request, manager, run


def test_uncached_blocks_are_evicted_first_then_the_least_recently_used_tail() -> None:
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


def test_freeing_twice_is_an_error() -> None:
    kv = manager()
    blocks = kv.pool.allocate(1)
    kv.pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        kv.pool.free(blocks)
