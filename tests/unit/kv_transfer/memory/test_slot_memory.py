"""A worker's KV memory: blocks in host memory, which are their own slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.memory.staged_memory import StagedMemory
from support.kv_transfer.slot_blocks import ALL_HEADS, LAYOUT, Device, expected_sums, random_blocks


def test_blocks_in_host_memory_are_their_own_slots() -> None:
    blocks = random_blocks()
    memory = HostMemory(blocks.ctypes.data, LAYOUT)
    assert (memory.base_address, memory.num_slots, memory.mem_type) == (
        blocks.ctypes.data,
        6,
        "DRAM",
    )
    assert memory.expose([4, 1]) == memory.accept([4, 1]) == [4, 1]
    before = blocks.copy()
    memory.commit([4, 1], [4, 1], ALL_HEADS)
    memory.release([4, 1])
    np.testing.assert_array_equal(blocks, before)


def test_sums_cover_the_requested_heads() -> None:
    blocks = random_blocks()
    memory = HostMemory(blocks.ctypes.data, LAYOUT)
    assert memory.block_sums([5, 0], ALL_HEADS).tolist() == expected_sums(blocks[[5, 0]])
    assert memory.block_sums([2, 2], HeadRange(4, 1)).tolist() == expected_sums(blocks[[2, 2], 1:2])
    assert memory.block_sums([3], HeadRange(4, 2)).tolist() == expected_sums(blocks[[3], 1:3])
    assert memory.block_sums([], ALL_HEADS).tolist() == []


def test_the_function_for_sums_can_be_replaced() -> None:
    blocks = random_blocks()
    asked: list[tuple[list[int], int]] = []

    def sum_runs(addresses: np.ndarray, nbytes: int) -> np.ndarray:
        asked.append(((addresses - blocks.ctypes.data).tolist(), nbytes))
        return np.full(len(addresses), 7, dtype=np.uint64)

    memory = HostMemory(blocks.ctypes.data, LAYOUT, sum_runs)
    assert memory.block_sums([1, 4], HeadRange(5, 1)).tolist() == [7, 7]
    block, head = LAYOUT.block_nbytes, LAYOUT.head_nbytes
    assert asked == [([block + 2 * head, 4 * block + 2 * head], head)]


def test_heads_that_are_no_multiple_of_a_word_are_refused() -> None:
    odd = KVCacheLayout(
        num_blocks=1, num_kv_heads=1, num_layers=1, block_size=1, head_dim=3, dtype="bfloat16"
    )
    with pytest.raises(ValueError, match="multiple of 8 bytes, this layout's has 12"):
        HostMemory(0, odd)
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        StagedMemory(0, 1, odd, copy_out=lambda *_: None, copy_in=lambda *_: None)


class AnyUse(RuleBasedStateMachine):
    """No slot is used twice, and all slots are returned."""

    used = Bundle("used")

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(num_slots=5)
        self.memory = self.device.memory
        #: slot -> the block it holds.
        self.held: dict[int, int] = {}

    @rule(target=used, block_ids=st.lists(st.integers(0, 5), max_size=5), exposing=st.booleans())
    def take(self, block_ids: list[int], exposing: bool) -> object:
        slots = self.memory.expose(block_ids) if exposing else self.memory.accept(block_ids)
        if slots is None:
            assert len(block_ids) > 5 - len(self.held)
            return multiple()
        assert len(slots) == len(block_ids)
        assert not set(slots) & self.held.keys(), "a slot was taken twice"
        assert set(slots) <= set(range(5))
        if not exposing:
            for slot, block_id in zip(slots, block_ids, strict=True):
                self.device.slots[slot] = self.device.blocks[block_id]
            self.memory.commit(slots, block_ids, ALL_HEADS)
        self.held.update(zip(slots, block_ids, strict=True))
        return multiple(*slots)

    @rule(slot=used)
    def release(self, slot: int) -> None:
        if slot in self.held:
            self.memory.release([slot])
            del self.held[slot]
        else:
            with pytest.raises(ValueError, match="not in use"):
                self.memory.release([slot])

    @invariant()
    def held_slots_keep_their_blocks(self) -> None:
        assert self.memory.num_free_slots == 5 - len(self.held)
        if self.held:
            sums = self.memory.block_sums(list(self.held), ALL_HEADS).tolist()
            assert sums == expected_sums(self.device.blocks[list(self.held.values())])

    def teardown(self) -> None:
        self.memory.release(list(self.held))
        assert self.memory.accept([0] * 5) is not None


AnyUse.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestAnyUse = AnyUse.TestCase
