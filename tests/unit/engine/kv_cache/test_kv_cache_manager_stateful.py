"""Any order of manager calls, with copies applied to a model of all memories.

Every request must read the KV of its own tokens. A slot's content is the sequence of tokens up to
its position, as KV depends on all of them.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_engine.executor.step import BlockCopy
from baton_engine.kv_cache.block_pool import BlockPool
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_protocol.block_hash import root_hash
from baton_protocol.engine_messages import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineCoreRequest,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.block_hashes import hash_blocks

BLOCK, NUM_BLOCKS, NUM_SWAP_BLOCKS = 4, 10, 6
MAX_TOKENS = 20
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=MAX_TOKENS)
#: Prompts of one repeated token, so that many share a prefix.
REPEATED = st.builds(
    lambda token, times: [token] * times, st.integers(1, 3), st.integers(1, MAX_TOKENS)
)

Memory = list[list[tuple[int, ...]]]


class KVMachine(RuleBasedStateMachine):
    @initialize(num_offload_blocks=st.sampled_from([0, 1, 2, 5, 12]))
    def start(self, num_offload_blocks: int) -> None:
        self.kv = KVCacheManager(
            NUM_BLOCKS,
            BLOCK,
            "model",
            num_swap_blocks=NUM_SWAP_BLOCKS,
            num_offload_blocks=num_offload_blocks,
            enable_events=True,
        )
        self.device: Memory = [[()] * BLOCK for _ in range(NUM_BLOCKS)]
        self.host: Memory = [[()] * BLOCK for _ in range(NUM_SWAP_BLOCKS)]
        self.offloaded: Memory = [[()] * BLOCK for _ in range(num_offload_blocks)]
        self.live: list[Request] = []
        self.replayed: set[bytes] = set()

    def _on_device(self) -> list[Request]:
        return [request for request in self.live if not request.swapped_blocks]

    def _pick(self, data: st.DataObject, requests: list[Request]) -> Request:
        return data.draw(st.sampled_from(requests))

    @staticmethod
    def _copy(source: Memory, target: Memory, copies: list[BlockCopy]) -> None:
        assert (
            not {copy.source for copy in copies} & {copy.target for copy in copies}
            or source is not target
        )
        assert len({copy.target for copy in copies}) == len(copies)
        for copy in copies:
            target[copy.target] = list(source[copy.source])

    def _copy_offloaded(self) -> None:
        """Apply the offload copies of a step: its stores, then its restores."""
        stores, restores = self.kv.take_offload_copies()
        self._copy(self.device, self.offloaded, stores)
        self._copy(self.offloaded, self.device, restores)

    def _state(self) -> object:
        tables = [
            (request.block_ids, [b.block_id for b in request.swapped_blocks])
            for request in self.live
        ]
        return tables, self.kv.num_free_blocks, self.kv.swap_pool.num_free_blocks

    @rule(prompts=st.lists(TOKENS | REPEATED, min_size=1, max_size=3), keep_free=st.integers(0, 2))
    def admit(self, prompts: list[list[int]], keep_free: int) -> None:
        """Admit requests in one step."""
        for tokens in prompts:
            self._admit(tokens, keep_free)
        self._copy_offloaded()

    @rule(prompts=st.lists(REPEATED, min_size=1, max_size=4))
    def serve(self, prompts: list[list[int]]) -> None:
        """Run requests from admission to their end, which fills the prefix cache."""
        for tokens in prompts:
            num_live = len(self.live)
            self._admit(tokens, 0)
            self._copy_offloaded()
            for request in self.live[num_live:]:
                self._write(request, len(tokens), 1)
                self.kv.cache_blocks(request, request.num_computed_tokens)
                self._end(request)

    def _admit(self, tokens: list[int], keep_free: int) -> None:
        request = Request(EngineCoreRequest("r", tokens, SamplingParams()))
        cached = self.kv.find_cached_prefix(request, len(tokens) - 1)
        before = self._state()
        if not self.kv.can_allocate(request, len(tokens), cached, keep_free=keep_free):
            assert keep_free or not self.kv.allocate(request, len(tokens), cached)
            assert self._state() == before
            return
        assert self.kv.allocate(request, len(tokens), cached)
        assert self.kv.num_free_blocks >= keep_free
        found = [
            self.kv.pool.find(block_hash)
            for block_hash in self.kv.block_hashes(request)[: len(cached)]
        ]
        assert request.blocks[: len(cached)] == found
        request.num_computed_tokens = len(cached) * BLOCK
        self.live.append(request)

    @precondition(lambda self: self._on_device())
    @rule(data=st.data(), num_tokens=st.integers(1, 10), token=st.integers(1, 3))
    def write(self, data: st.DataObject, num_tokens: int, token: int) -> None:
        request = self._pick(data, self._on_device())
        end = min(request.num_computed_tokens + num_tokens, MAX_TOKENS)
        if self._write(request, end, token) and data.draw(st.integers(0, 3)):
            self.kv.cache_blocks(request, end)

    def _write(self, request: Request, end: int, token: int) -> bool:
        """Run a step of known and new tokens. Return False if blocks are missing."""
        start = request.num_computed_tokens
        if not self.kv.allocate(request, end):
            return False
        before = self._state()
        copies = self.kv.make_writable(request, start, end)
        self._copy_offloaded()
        if copies is None:
            assert self._state() == before
            return False
        self._copy(self.device, self.device, copies)
        request.token_ids += [token] * (end - len(request.token_ids))
        for position in range(start, end):
            block = request.blocks[position // BLOCK]
            assert block.ref_count == 1
            assert block.block_hash is None
            self.device[block.block_id][position % BLOCK] = tuple(request.token_ids[: position + 1])
        request.num_computed_tokens = end
        return True

    @precondition(lambda self: self._on_device())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self._pick(data, self._on_device())
        if parent.num_computed_tokens == 0 or len(self.live) >= 6:
            return
        num_tokens = data.draw(st.integers(1, parent.num_computed_tokens))
        child = Request(EngineCoreRequest("child", parent.token_ids[:num_tokens], SamplingParams()))
        self.kv.fork(parent, child, num_tokens)
        child.num_computed_tokens = num_tokens
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._end(self._pick(data, self.live))

    def _end(self, request: Request) -> None:
        self.kv.free(request)
        self.kv.free(request)
        self.live.remove(request)

    @precondition(lambda self: self._on_device())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        requests = data.draw(
            st.lists(st.sampled_from(self._on_device()), min_size=1, max_size=3, unique_by=id)
        )
        before = self._state()
        copies = self.kv.swap_out(requests)
        if copies is None:
            assert self._state() == before
            return
        self._copy(self.device, self.host, copies)

    @precondition(lambda self: any(request.swapped_blocks for request in self.live))
    @rule(data=st.data(), keep_free=st.integers(0, 2))
    def swap_in(self, data: st.DataObject, keep_free: int) -> None:
        swapped = [request for request in self.live if request.swapped_blocks]
        requests = data.draw(
            st.lists(st.sampled_from(swapped), min_size=1, max_size=3, unique_by=id)
        )
        before = self._state()
        if not self.kv.can_swap_in(requests, keep_free=keep_free):
            assert keep_free or self.kv.swap_in(requests) is None
            assert self._state() == before
            return
        copies = self.kv.swap_in(requests)
        assert copies is not None
        assert self.kv.num_free_blocks >= keep_free
        self._copy_offloaded()
        self._copy(self.host, self.device, copies)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert not self.kv.pool._cached
        assert not self._offloaded_hashes

    @property
    def _offloaded_hashes(self) -> set[bytes]:
        return set(self.kv.offload._slots) if self.kv.offload is not None else set()

    @invariant()
    def every_request_reads_the_kv_of_its_tokens(self) -> None:
        for request in self.live:
            memory, blocks = (
                (self.host, request.swapped_blocks)
                if request.swapped_blocks
                else (self.device, request.blocks)
            )
            for position in range(request.num_computed_tokens):
                content = memory[blocks[position // BLOCK].block_id][position % BLOCK]
                assert content == tuple(request.token_ids[: position + 1])

    @invariant()
    def findable_blocks_hold_the_tokens_of_their_hash(self) -> None:
        for block_hash in self.kv.pool._cached:
            block = self.kv.pool.find(block_hash)
            assert block.block_hash == block_hash
            self._check_content(self.device[block.block_id], block_hash)
        for block_hash in self._offloaded_hashes:
            offloaded = self.kv.offload.find(block_hash)
            self._check_content(self.offloaded[offloaded.slot], block_hash)

    def _check_content(self, content: list[tuple[int, ...]], block_hash: bytes) -> None:
        tokens = content[-1]
        assert hash_blocks(root_hash("model"), tokens, BLOCK)[-1] == block_hash
        assert content == [tokens[: len(tokens) - BLOCK + 1 + slot] for slot in range(BLOCK)]

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        self._check_pool(self.kv.pool, [request.block_ids for request in self.live])
        self._check_pool(
            self.kv.swap_pool,
            [[b.block_id for b in request.swapped_blocks] for request in self.live],
        )

    def _check_pool(self, pool: BlockPool, tables: list[list[int]]) -> None:
        holders = Counter(block_id for table in tables for block_id in table)
        assert [block.ref_count for block in pool.blocks] == [
            holders[index] for index in range(pool.num_blocks)
        ]
        free: list[int] = []
        ring = pool._free._ring
        node = ring.next
        while node is not None and node is not ring:
            assert node.next is not None
            assert node.next.prev is node
            free.append(node.block_id)
            node = node.next
        assert sorted(free) == sorted(set(range(pool.num_blocks)) - holders.keys())
        assert len(free) == pool.num_free_blocks

    @invariant()
    def events_match_the_content_of_the_cache(self) -> None:
        for event in self.kv.take_events():
            match event:
                case BlocksStored(block_hashes=hashes):
                    self.replayed.update(hashes)
                case BlocksRemoved(block_hashes=hashes):
                    assert self.replayed >= set(hashes)
                    self.replayed.difference_update(hashes)
                case AllBlocksCleared():
                    self.replayed.clear()
        assert self.replayed == self.kv.pool._cached.keys() | self._offloaded_hashes

    def teardown(self) -> None:
        for request in self.live:
            self.kv.free(request)
        assert (self.kv.num_free_blocks, self.kv.swap_pool.num_free_blocks) == (
            NUM_BLOCKS,
            NUM_SWAP_BLOCKS,
        )


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
