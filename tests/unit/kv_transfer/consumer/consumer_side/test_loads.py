"""A consumer with scripted producers: reading, cancelling, slots and deadlines of loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_kv_transfer.connector import FailureReason, LoadResult
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.side_channel import Heartbeat, Pending, Publish, Release, Released, Subscribe
from support.kv_transfer.consumer_rig import (
    BLOCK_NBYTES,
    NUM_HEADS,
    Rig,
    Staging,
    Worker,
    failures,
)

# Reading


def test_blocks_are_read_as_they_are_published(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [7, 3, 5])
    assert (subscribe.heads, subscribe.push_slots) == (HeadRange(0, NUM_HEADS), None)
    rig.deliver(worker, worker.published(subscribe, [0, 1]))
    assert rig.stats.blocks_received == 2
    assert not rig.results
    rig.deliver(worker, worker.published(subscribe, [2], last=True))
    assert rig.results == {"t": LoadResult(3)}
    release = worker.receive(Release)
    assert (release.generation, release.completed) == (subscribe.generation, True)
    assert (rig.stats.bytes_received, rig.stats.transfers_completed) == (3 * BLOCK_NBYTES, 1)


def test_only_the_requested_blocks_are_read(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [4, 5], first=2)
    assert subscribe.first_block_index == 2
    rig.deliver(worker, worker.published(subscribe, range(6), last=True))
    assert rig.results == {"t": LoadResult(2)}
    assert rig.stats.blocks_received == 2


def test_a_cancelled_load_ends_after_its_reads(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0, 1], last=True))
    rig.consumer.cancel("t")
    rig.advance()
    assert not rig.results
    assert not any(isinstance(message, Release) for message in worker.poll()), (
        "released during a read"
    )
    rig.agent.land(rig.agent.held[0])
    rig.advance()
    assert rig.results["t"].error == "cancelled"
    assert failures(rig) == {FailureReason.CANCELLED: 1}
    assert not worker.receive(Release).completed


def test_reads_that_do_not_end_are_aborted_by_disconnecting(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    rig.advance(10.0)
    assert not rig.results
    rig.advance(5.0)
    rig.advance()
    assert rig.results["t"].num_valid_blocks == 0
    assert failures(rig) == {FailureReason.TIMEOUT: 1}
    assert rig.agent.num_fences == 0


def test_reads_that_disconnecting_does_not_end_are_fenced(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    rig.agent.hold = rig.agent.ignores_removal = True
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    rig.advance(10.0)
    rig.advance(5.0)
    rig.advance()
    assert not rig.results
    rig.advance(5.0)
    assert rig.results["t"].num_valid_blocks == 0
    assert rig.stats.memory_fences == 1


def test_loads_of_one_peer_share_its_window(
    made: Callable[[Any], Any], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_kv_transfer.consumer.read_window.MAX_READ_BYTES", 2 * BLOCK_NBYTES)
    rig = made(Rig(max_inflight_bytes=4 * BLOCK_NBYTES))
    long, short = rig.subscribed("long", worker, range(12)), rig.subscribed("short", worker, [20])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(long, range(12), last=True))
    rig.deliver(worker, worker.published(short, [0], last=True))
    assert (rig.stats.inflight_bytes, rig.stats.queued_bytes) == (
        4 * BLOCK_NBYTES,
        9 * BLOCK_NBYTES,
    )
    turns = 0
    while "short" not in rig.results:
        rig.agent.land(rig.agent.held[0])
        rig.advance()
        assert rig.stats.inflight_bytes <= 4 * BLOCK_NBYTES
        turns += 1
    assert turns <= 4
    while rig.agent.held:
        rig.agent.land(rig.agent.held[0])
        rig.advance()
    assert rig.results == {"short": LoadResult(1), "long": LoadResult(12)}
    assert (rig.stats.inflight_bytes, rig.stats.queued_bytes) == (0, 0)


def test_a_failed_load_leaves_the_queue(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_kv_transfer.consumer.read_window.MAX_READ_BYTES", 2**20)
    subscribe = rig.subscribed("t", worker, range(8))
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0]))
    rig.deliver(worker, worker.published(subscribe, range(1, 8), last=True))
    for handle in list(rig.agent.held):
        rig.agent.break_off(handle)
    rig.advance()
    assert failures(rig) == {FailureReason.PEER_LOST: 1}
    assert (rig.stats.inflight_bytes, rig.stats.queued_bytes) == (0, 0)


# Slots


@pytest.mark.parametrize("push", [False, True])
def test_a_load_larger_than_the_slots_is_read_in_parts(
    made: Callable[[Any], Any], worker: Worker, push: bool
) -> None:
    staging = Staging(3)
    rig = made(Rig(memory=staging, push=push))
    subscribe = rig.subscribed("t", worker, range(10, 18))
    assert subscribe.push_slots is None, "a load that never fits must not be pushed"
    rig.deliver(worker, worker.published(subscribe, range(8), last=True))
    assert rig.results == {"t": LoadResult(8)}
    assert staging.memory.num_free_slots == 3


def test_a_pushed_load_waits_for_slots_and_returns_them(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    staging = Staging(4)
    rig = made(Rig(memory=staging, push=True))
    first = rig.subscribed("a", worker, [10, 11, 12])
    rig.begin("b", worker, [20, 21])
    rig.advance()
    assert not worker.poll()
    publish = worker.published(first, [0, 1, 2], last=True, written=True)
    assert worker.write(first, publish.blocks, rig.layout) == "DONE"
    rig.deliver(worker, publish)
    assert rig.results == {"a": LoadResult(3)}
    second = worker.receive(Subscribe)
    assert second.push_slots is not None
    rig.advance(10.0)
    assert not rig.results.get("b"), "the load ended while it may still be written to"
    rig.deliver(worker, Released("b", second.generation))
    assert failures(rig) == {FailureReason.TIMEOUT: 1}
    assert staging.memory.num_free_slots == 4


def test_a_load_waits_for_slots_as_long_as_its_producer_answers_pending(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    staging = Staging(2)
    rig = made(Rig(memory=staging, push=True))
    rig.subscribed("holds", worker, [1, 2])
    rig.begin("waits", worker, [3])
    for _ in range(3):
        rig.deliver(worker, Pending(["holds", "waits"]))
        rig.advance(4.0)
    assert not rig.results
    for _ in range(3):
        rig.deliver(worker, Pending(["holds"]))
        rig.advance(4.0)
    assert rig.results.keys() == {"waits"}
    assert failures(rig) == {FailureReason.TIMEOUT: 1}


# Time


def test_heartbeats_keep_the_lease(rig: Rig, worker: Worker) -> None:
    worker.lease_s = 3.0
    rig.subscribed("t", worker, [1])
    worker.poll()
    for _ in range(3):
        deadline = rig.consumer.next_deadline()
        assert deadline is not None
        assert deadline <= rig.clock.now + 1.0
        rig.advance(max(0.0, deadline - rig.clock.now))
        assert worker.receive(Heartbeat).transfer_ids == ["t"]


def test_a_load_waits_as_long_as_the_producer_answers_pending(rig: Rig, worker: Worker) -> None:
    rig.subscribed("t", worker, [1])
    for _ in range(720):  # an hour
        rig.deliver(worker, Pending(["t", "t", "unknown"]))
        rig.advance(5.0)
    assert not rig.results
    rig.advance(5.0)
    rig.advance(5.0)
    assert failures(rig) == {FailureReason.TIMEOUT: 1}


def test_a_repeated_last_publication_is_no_progress(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    for _ in range(2):
        rig.advance(5.0)
        if not rig.stats.failures and rig.consumer.peers():
            rig.deliver(worker, Publish("t", subscribe.generation, [], True, False))
    rig.advance(5.0)
    rig.advance()
    assert failures(rig) == {FailureReason.TIMEOUT: 1}


def test_after_a_defect_every_load_ends_and_no_slot_is_kept(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    staging = Staging(8)
    rig = made(Rig(memory=staging))
    subscribe = rig.subscribed("t", worker, [1, 2])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0]))
    rig.begin("u", worker, [3])
    rig.agent.close()
    assert dict(rig.consumer.fail_all("a defect")) == {
        "t": LoadResult(0, "a defect"),
        "u": LoadResult(0, "a defect"),
    }
    assert failures(rig) == {FailureReason.DEFECT: 2}
    assert staging.memory.num_free_slots == 8
    assert (rig.stats.inflight_bytes, rig.stats.queued_bytes) == (0, 0)
