"""Blocks of a device, staged through slots in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.memory.staged_memory import StagedMemory
from support.kv_transfer.slot_blocks import ALL_HEADS, LAYOUT, Device, expected_sums


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
