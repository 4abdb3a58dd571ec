"""The pool of KV blocks: allocation order, references, the prefix cache and its events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_engine.kv_cache.block_pool import Block, BlockPool, FreeList
from baton_protocol.engine_messages import AllBlocksCleared, BlocksRemoved, KVEvent

NUM_BLOCKS = 5
HASHES = [bytes([value]) * 16 for value in range(4)]


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


@given(st.lists(st.tuples(st.sampled_from(["append", "append_left", "remove"]), st.integers(0, 4))))
def test_a_free_list_has_the_order_of_a_list_with_the_same_operations(
    operations: list[tuple[str, int]],
) -> None:
    blocks = [Block(block_id) for block_id in range(NUM_BLOCKS)]
    free, model = FreeList(blocks[:2]), blocks[:2]
    for operation, block_id in operations:
        block = blocks[block_id]
        if (operation == "remove") != (block in model):
            continue
        getattr(free, operation)(block)
        if operation == "remove":
            model.remove(block)
        else:
            model.insert(0 if operation == "append_left" else len(model), block)
        assert len(free) == len(model)
    assert [free.pop_left() for _ in model] == model
    with pytest.raises(IndexError, match="no free KV block"):
        free.pop_left()


def test_uncached_blocks_are_allocated_first_then_the_tail_of_the_sequence_freed_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block, block_hash in zip([*first, second[0]], HASHES, strict=False):
        assert pool.cache(block, block_hash)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(4) == [second[1], first[1], first[0], second[0]]


def test_a_free_cached_block_is_found_by_its_hash_until_it_is_allocated() -> None:
    events: list[KVEvent] = []
    pool = BlockPool(1, events)
    [block] = pool.allocate(1)
    pool.cache(block, HASHES[0])
    pool.free([block])
    assert pool.find(HASHES[0]) is block
    assert events == []
    pool.allocate(1)
    assert pool.find(HASHES[0]) is None
    assert events == [BlocksRemoved([HASHES[0]])]


def test_a_block_in_use_by_two_sequences_is_free_after_both() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert (pool.num_free_blocks, pool.usage) == (1, 0.5)
    pool.free(blocks)
    assert (pool.num_free_blocks, pool.usage) == (2, 0.0)


def test_a_reset_clears_the_prefix_cache_but_not_the_references() -> None:
    events: list[KVEvent] = []
    pool = BlockPool(2, events)
    blocks = pool.allocate(1)
    pool.cache(blocks[0], HASHES[0])
    pool.reset()
    assert (pool.find(HASHES[0]), blocks[0].ref_count) == (None, 1)
    assert events == [AllBlocksCleared()]


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)


def test_an_empty_pool_has_no_block_to_allocate() -> None:
    pool = BlockPool(0)
    assert (pool.allocate(0), pool.usage) == ([], 0.0)
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 are free"):
        pool.allocate(1)


class PoolMachine(RuleBasedStateMachine):
    """Compares a pool with a model: the list of free blocks, references, and hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[KVEvent] = []
        self.pool = BlockPool(NUM_BLOCKS, self.events)
        #: The block that is allocated next is the first.
        self.free = list(range(NUM_BLOCKS))
        self.references = [0] * NUM_BLOCKS
        self.cached: dict[bytes, int] = {}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(ValueError, match=f"{count} KV blocks wanted"):
                self.pool.allocate(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        with self.removal_reported(taken):
            assert ids(self.pool.allocate(count)) == taken
        for block_id in taken:
            self.references[block_id] = 1

    @rule(chosen=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def touch(self, chosen: set[int]) -> None:
        self.pool.touch(self.pool.blocks[block_id] for block_id in chosen)
        for block_id in chosen:
            self.references[block_id] += 1
        self.free = [block_id for block_id in self.free if block_id not in chosen]

    @rule(order=st.permutations(range(NUM_BLOCKS)), count=st.integers(0, NUM_BLOCKS))
    def free_sequence(self, order: list[int], count: int) -> None:
        held = [block_id for block_id in order if self.references[block_id]][:count]
        self.pool.free([self.pool.blocks[block_id] for block_id in held])
        for block_id in reversed(held):
            self.references[block_id] -= 1
            if not self.references[block_id]:
                is_cached = block_id in self.cached.values()
                self.free.insert(len(self.free) if is_cached else 0, block_id)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), block_hash=st.sampled_from(HASHES))
    def cache(self, block_id: int, block_hash: bytes) -> None:
        is_new = block_hash not in self.cached and block_id not in self.cached.values()
        assert self.pool.cache(self.pool.blocks[block_id], block_hash) == is_new
        if is_new:
            self.cached[block_hash] = block_id

    @rule(chosen=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    def evict(self, chosen: list[int]) -> None:
        with self.removal_reported(chosen):
            self.pool.evict(self.pool.blocks[block_id] for block_id in chosen)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.cached.clear()
        assert self.events.pop() == AllBlocksCleared()

    @contextlib.contextmanager
    def removal_reported(self, block_ids: list[int]) -> Iterator[None]:
        """Remove the blocks from the model's cache, and check the event of the removal."""
        hashes = {block_id: block_hash for block_hash, block_id in self.cached.items()}
        removed = [hashes[block_id] for block_id in block_ids if block_id in hashes]
        yield
        for block_hash in removed:
            del self.cached[block_hash]
        assert self.events == ([BlocksRemoved(removed)] if removed else [])
        self.events.clear()

    @invariant()
    def the_pool_matches_the_model(self) -> None:
        assert [block.ref_count for block in self.pool.blocks] == self.references
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.usage == pytest.approx(1 - len(self.free) / NUM_BLOCKS)
        for block_hash in HASHES:
            block = self.pool.find(block_hash)
            assert (block and block.block_id) == self.cached.get(block_hash)
        assert self.events == []

    def teardown(self) -> None:
        assert ids(self.pool.allocate(len(self.free))) == self.free


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
