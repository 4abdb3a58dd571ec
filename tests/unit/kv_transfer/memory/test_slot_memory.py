"""A worker's KV memory: blocks in host memory, and blocks staged in slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.memory.staged_memory import StagedMemory

#: The second of three workers.
LAYOUT = KVCacheLayout(
    num_blocks=6,
    num_kv_heads=3,
    num_layers=2,
    block_size=4,
    head_dim=6,
    dtype="bfloat16",
    first_kv_head=3,
    total_kv_heads=9,
)
ALL_HEADS = LAYOUT.heads


def random_blocks() -> np.ndarray:
    """Return random blocks: uint8 [num_blocks, heads, head_nbytes]."""
    shape = (LAYOUT.num_blocks, LAYOUT.num_kv_heads, LAYOUT.head_nbytes)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def expected_sums(rows: np.ndarray) -> list[int]:
    """Return the sums of contiguous copies of rows [n, ...]."""
    rows = np.ascontiguousarray(rows)
    addresses = rows.ctypes.data + np.arange(len(rows)) * rows[0].nbytes
    return checksum.sum_runs(addresses, rows[0].nbytes).tolist()


class Device:
    """Simulated device blocks, and slots in host memory."""

    def __init__(self, num_slots: int) -> None:
        self.blocks = random_blocks()
        self.slots = np.zeros((num_slots, LAYOUT.num_kv_heads, LAYOUT.head_nbytes), dtype=np.uint8)
        self.memory = StagedMemory(
            self.slots.ctypes.data, num_slots, LAYOUT, copy_out=self.copy_out, copy_in=self.copy_in
        )

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.slots[list(slots)] = self.blocks[list(block_ids)]

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        mine = slice(heads.first - LAYOUT.first_kv_head, heads.end - LAYOUT.first_kv_head)
        self.blocks[list(block_ids), mine] = self.slots[list(slots), mine]


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


def test_staged_blocks_are_copied_through_slots() -> None:
    producer, consumer = Device(num_slots=4), Device(num_slots=3)
    consumer.blocks[:] = 0
    exposed, accepted = producer.memory.expose([5, 2]), consumer.memory.accept([0, 1])
    assert exposed is not None
    assert accepted is not None
    consumer.slots[accepted] = producer.slots[exposed]  # the transfer
    sums = producer.memory.block_sums(exposed, ALL_HEADS)
    np.testing.assert_array_equal(consumer.memory.block_sums(accepted, ALL_HEADS), sums)
    assert sums.tolist() == expected_sums(producer.blocks[[5, 2]])
    consumer.memory.commit(accepted, [0, 1], ALL_HEADS)
    np.testing.assert_array_equal(consumer.blocks[[0, 1]], producer.blocks[[5, 2]])
    assert not consumer.blocks[2:].any()


def test_an_exposed_copy_does_not_change_with_its_block() -> None:
    device = Device(num_slots=2)
    slots = device.memory.expose([3])
    assert slots is not None
    before = device.memory.block_sums(slots, ALL_HEADS).tolist()
    device.blocks[3] += 1
    assert device.memory.block_sums(slots, ALL_HEADS).tolist() == before


def test_heads_are_committed_separately() -> None:
    device = Device(num_slots=2)
    before = device.blocks.copy()
    slots = device.memory.accept([1])
    assert slots is not None
    device.slots[slots] = 77
    device.memory.commit(slots, [1], HeadRange(4, 2))
    assert (device.blocks[1, 1:] == 77).all()
    np.testing.assert_array_equal(device.blocks[1, 0], before[1, 0])


def test_without_enough_free_slots_none_is_taken() -> None:
    device = Device(num_slots=3)
    first = device.memory.accept([0, 1])
    assert first == [0, 1]
    assert device.memory.expose([2, 3]) is None
    assert device.memory.accept([2, 3]) is None
    assert device.memory.num_free_slots == 1
    device.memory.release(first)
    assert device.memory.expose([2, 3]) == [0, 1]


def test_more_blocks_than_slots_are_refused_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device(num_slots=2)
    for _ in range(3):
        assert device.memory.accept([0, 1, 2]) is None
        assert device.memory.expose([0, 1, 2]) is None
    (record,) = caplog.records
    assert "a transfer needs 3 slots of host memory at once, and there are 2" in record.getMessage()
    assert "kv_transfer.staging_bytes" in record.getMessage()
    assert device.memory.num_free_slots == 2


def test_memory_without_a_slot_is_refused() -> None:
    device = Device(num_slots=1)
    with pytest.raises(ValueError, match="staging_bytes"):
        StagedMemory(0, 0, LAYOUT, copy_out=device.copy_out, copy_in=device.copy_in)


def test_slots_return_when_copying_out_fails() -> None:
    device = Device(num_slots=2)
    with pytest.raises(IndexError):
        device.memory.expose([LAYOUT.num_blocks])
    assert device.memory.num_free_slots == 2


def test_releasing_an_unused_slot_is_refused_and_releases_nothing() -> None:
    device = Device(num_slots=4)
    memory = device.memory
    slots = memory.accept([0, 1])
    for wrong in ([*slots, 3], [*slots, 4], [-1], [slots[0], slots[0]]):
        with pytest.raises(ValueError, match="slot"):
            memory.release(wrong)
    assert memory.num_free_slots == 2
    memory.release(slots)
    with pytest.raises(ValueError, match="it was released"):
        memory.release(slots[:1])
    with pytest.raises(ValueError, match="not in use"):
        memory.block_sums(slots, ALL_HEADS)
    assert memory.num_free_slots == 4


def test_only_accepted_slots_are_committed_to_their_block() -> None:
    device = Device(num_slots=4)
    before = device.blocks.copy()
    accepted, exposed = device.memory.accept([0, 1]), device.memory.expose([2])
    assert accepted is not None
    assert exposed is not None
    device.slots[:] = 0
    for slots, block_ids in ((exposed, [2]), ([3], [0]), (accepted, [1, 0])):
        with pytest.raises(ValueError, match="not accepted for block"):
            device.memory.commit(slots, block_ids, ALL_HEADS)
    np.testing.assert_array_equal(device.blocks, before)


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
