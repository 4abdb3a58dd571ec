"""The blocks of a load are verified in batches, and a block that differs is read once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_kv_transfer.connector import FailureReason, LoadResult
from baton_kv_transfer.consumer.block_verifier import VERIFY_SLICE_S
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.side_channel import Release
from support.kv_transfer.consumer_rig import BLOCK_NBYTES, Rig, Worker, failures


def test_blocks_of_one_transfer_are_verified_in_one_call(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    class Counting(HostMemory):
        calls: list[int] = []  # noqa: RUF012

        def block_sums(self, slots: Any, heads: HeadRange) -> Any:
            self.calls.append(len(slots))
            return super().block_sums(slots, heads)

    rig = made(Rig(memory=lambda blocks, layout: Counting(blocks.ctypes.data, layout)))
    subscribe = rig.subscribed("t", worker, range(8))
    rig.deliver(worker, worker.published(subscribe, range(8), last=True))
    assert rig.results == {"t": LoadResult(8)}
    assert Counting.calls == [8]
    assert rig.stats.descriptors_posted == 1, "adjacent blocks were not merged"


def test_a_block_with_a_wrong_checksum_is_read_again(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2])
    publish = worker.published(subscribe, [0, 1], last=True)
    slot = publish.blocks[1].slot
    worker.blocks[slot, 5] ^= 1
    rig.agent.hold = True
    rig.deliver(worker, publish)
    rig.agent.land(rig.agent.held[0])
    rig.advance()
    assert (rig.stats.checksum_failures, rig.stats.blocks_received) == (1, 1)
    worker.blocks[slot, 5] ^= 1
    rig.agent.land(rig.agent.held[0])
    rig.advance()
    assert rig.results == {"t": LoadResult(2)}


def test_a_block_with_a_wrong_checksum_twice_ends_the_valid_prefix(
    rig: Rig, worker: Worker
) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2, 3])
    publish = worker.published(subscribe, [0, 1, 2], last=True)
    worker.blocks[publish.blocks[1].slot, 5] ^= 1
    rig.deliver(worker, publish)
    assert rig.results["t"].num_valid_blocks == 1
    assert failures(rig) == {FailureReason.CHECKSUM: 1}
    assert not worker.receive(Release).completed


def test_after_each_time_slice_the_verifier_returns_and_the_rest_is_verified_later(
    made: Callable[[Any], Any], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_kv_transfer.consumer.read_window.MAX_READ_BYTES", BLOCK_NBYTES)

    class Slow(HostMemory):
        def block_sums(self, slots: Any, heads: HeadRange) -> Any:
            rig.clock.now += VERIFY_SLICE_S
            return super().block_sums(slots, heads)

    rig = made(Rig(memory=lambda blocks, layout: Slow(blocks.ctypes.data, layout)))
    subscribe = rig.subscribed("t", worker, range(3))
    rig.deliver(worker, worker.published(subscribe, range(3), last=True))
    for verified in (1, 2):
        assert (rig.stats.blocks_received, rig.results) == (verified, {})
        assert rig.consumer.next_deadline() == 0.0, "unverified blocks are due at once"
        rig.advance()
    assert rig.results == {"t": LoadResult(3)}
