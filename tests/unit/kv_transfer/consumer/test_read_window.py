"""The reads from one peer: batches, turns of loads, and bytes in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.consumer.load_state import RankTransfer
from baton_kv_transfer.consumer.read_window import MAX_READ_BYTES, ReadWindow
from baton_kv_transfer.memory.slot_memory import SlotMemory

BLOCK_NBYTES = MAX_READ_BYTES // 4


class Slots:
    """Memory with a number of free slots. A block's slot is 100 plus its id."""

    num_slots = 64

    def __init__(self, num_free: int = 64) -> None:
        self.num_free = num_free

    def accept(self, block_ids: list[int]) -> list[int] | None:
        if len(block_ids) > self.num_free:
            return None
        self.num_free -= len(block_ids)
        return [100 + block_id for block_id in block_ids]


def transfer(slots: list[int] | None = None) -> RankTransfer:
    load = SimpleNamespace(slots=slots, request=SimpleNamespace(block_ids=list(range(20))))
    fields = SimpleNamespace(load=load, block_nbytes=BLOCK_NBYTES, queued=[], num_batches=0)
    return cast(RankTransfer, fields)


def take(window: ReadWindow, slots: Slots) -> Any:
    return window.take_batch(cast(SlotMemory, slots))


@pytest.fixture
def stats() -> ConnectorStats:
    return ConnectorStats()


def test_loads_take_turns_after_each_batch(stats: ConnectorStats) -> None:
    window, slots = ReadWindow(2**40, stats), Slots()
    one, other = transfer(), transfer()
    window.enqueue(one, [0, 1, 2, 3, 4])
    window.enqueue(other, [7])
    batches = [take(window, slots) for _ in range(3)]
    assert [(each.rank_transfer, each.positions) for each in batches] == [
        (one, [0, 1, 2, 3]),
        (other, [7]),
        (one, [4]),
    ]
    assert batches[1].slots == [107]
    assert take(window, slots) is None
    assert (stats.queued_bytes, stats.inflight_bytes) == (0, 6 * BLOCK_NBYTES)
    for batch in batches:
        window.release(batch)
    assert stats.inflight_bytes == 0


def test_bytes_in_flight_are_limited_and_a_large_batch_is_read_alone(stats: ConnectorStats) -> None:
    window, slots = ReadWindow(BLOCK_NBYTES, stats), Slots()
    window.enqueue(transfer(), [0, 1, 2, 3, 4])
    first = take(window, slots)
    assert first.positions == [0, 1, 2, 3]
    assert take(window, slots) is None
    window.release(first)
    assert take(window, slots).positions == [4]


def test_fewer_blocks_are_read_while_slots_are_rare(stats: ConnectorStats) -> None:
    window, slots = ReadWindow(2**40, stats), Slots(num_free=1)
    blocked, pushed = transfer(), transfer(slots=list(range(50, 70)))
    window.enqueue(blocked, [0, 1, 2])
    assert take(window, slots).positions == [0]
    assert take(window, slots) is None
    window.enqueue(pushed, [3])  # has slots of its own
    assert take(window, slots).slots == [53]
    slots.num_free = 2
    assert take(window, slots).positions == [1, 2]


def test_a_dropped_transfer_is_not_read(stats: ConnectorStats) -> None:
    window = ReadWindow(2**40, stats)
    dropped = transfer()
    window.enqueue(dropped, [0, 1])
    assert stats.queued_bytes == 2 * BLOCK_NBYTES
    for _ in range(2):
        window.drop(dropped)
    assert take(window, Slots()) is None
    assert stats.queued_bytes == 0
