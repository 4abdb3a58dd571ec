"""Push: the producer writes only to the slots of active subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_kv_transfer import side_channel
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.side_channel import Cancelled, Pending, Publish, Refused, Released
from baton_kv_transfer.transports.transfer import TransportError
from support.kv_transfer.producer_rig import LEASE_S, NUM_BLOCKS, Consumer, Producer


@pytest.fixture
def consumer(make: Callable[..., Any], producer: Producer) -> Consumer:
    made: Consumer = make(Consumer, producer, push=True)
    return made


def test_a_notification_names_its_blocks_and_the_last_publish_names_all_written_blocks(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[9, 8, 7], first=1)
    producer.save([3, 4])
    assert consumer.heartbeat() == [Pending(["t"])], "published before the end of the write"
    assert not consumer.notified()
    producer.agent.let_go()
    (first,) = consumer.notified()
    producer.advance()
    assert not consumer.received(), "a publish repeats the notification"
    assert [(block.index, block.slot) for block in first.blocks] == [(1, 4)]
    assert (first.written, first.last) == (True, False)
    assert (consumer.bytes[9] == producer.memory.bytes[4]).all()
    producer.save([5, 6, 2], first=2, last=True)
    producer.let_writes_end()
    (publish,) = consumer.received()
    assert (publish.written, publish.last) == (True, True)
    assert [(block.index, block.slot) for block in publish.blocks] == [(1, 4), (2, 5), (3, 6)]
    assert [
        block for message in [first, *consumer.notified()] for block in message.blocks
    ] == publish.blocks
    assert (consumer.bytes[[8, 7]] == producer.memory.bytes[[5, 6]]).all()
    assert [slot for slot in range(NUM_BLOCKS) if consumer.bytes[slot].any()] == [7, 8, 9], (
        "a block without a slot was written"
    )
    assert consumer.release() == [Released("t", 7)]
    assert producer.finished == ["t"]
    assert producer.stats.bytes_sent == 3 * producer.memory.layout.block_nbytes
    assert producer.stats.blocks_sent == 3
    assert (producer.stats.queued_bytes, producer.stats.inflight_bytes) == (0, 0)


def test_the_last_publish_is_sent_without_wanted_blocks_in_the_last_step(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[9])
    producer.save([3])
    producer.let_writes_end()
    (notified,) = consumer.notified()
    assert not consumer.received()
    producer.save([4], first=1, last=True)
    assert consumer.received() == [Publish("t", 7, notified.blocks, last=True, written=True)]


@pytest.mark.parametrize(("ours", "theirs"), [((0, 4), (2, 2)), ((1, 2), (0, 4)), ((0, 2), (1, 3))])
def test_heads_are_written_to_their_place_in_the_consumers_worker(
    make: Callable[..., Any], ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    producer = make(Producer, heads=HeadRange(*ours))
    consumer = make(Consumer, producer, heads=HeadRange(*theirs), push=True)
    shared = HeadRange(*ours).overlap(HeadRange(*theirs))
    producer.offer()
    consumer.subscribe(slots=[5, 6])
    producer.save([3, 4], last=True)
    producer.let_writes_end()
    mine, other = (
        side.reshape(NUM_BLOCKS, heads[1], -1)[:, shared.first - heads[0] : shared.end - heads[0]]
        for side, heads in ((producer.memory.bytes, ours), (consumer.bytes, theirs))
    )
    assert (other[5:7] == mine[3:5]).all()
    assert consumer.bytes.any(axis=1).sum() == 2
    outside = consumer.bytes.reshape(NUM_BLOCKS, theirs[1], -1).any(axis=(0, 2)).sum()
    assert outside == shared.count


@pytest.mark.parametrize(
    ("slots", "num_refused"),
    [
        ([0, NUM_BLOCKS], 1),
        ([-1], 1),
        ([2**63, 2**64 - 1], 2),
        ([3, 3], 1),
        (list(range(-9, 0)), 9),
    ],
)
def test_slots_outside_the_described_memory_are_refused_and_counted(
    producer: Producer, consumer: Consumer, slots: list[int], num_refused: int
) -> None:
    producer.offer()
    cancelled, released = consumer.subscribe(slots=slots)
    assert "slots" in cancelled.reason
    assert released == Released("t", 7)
    assert producer.stats.descriptors_refused == num_refused
    producer.save([3, 4], last=True)
    assert producer.agent.held == []


@pytest.mark.parametrize(
    "lie",
    [
        {"agent_metadata": b"garbage"},
        {"base_address": 0},
        {"base_address": -(2**63)},
        {"base_address": 2**63 - 1},
        {"num_slots": NUM_BLOCKS + 1},
        {"num_slots": 0},
        {"num_slots": 2**62},
        {"slot_nbytes": 1},
        {"slot_nbytes": -1},
        {"mem_type": "PUNCHED CARDS"},
        {"mem_type": "VRAM"},
        {"device_id": 7},
        {"device_id": -1},
    ],
    ids=str,
)
def test_an_invalid_description_is_refused(
    make: Callable[..., Any], producer: Producer, consumer: Consumer, lie: dict[str, Any]
) -> None:
    liar = make(Consumer, producer, instance_id="L", handshake=False)
    (welcome,) = liar.send(liar.hello())
    (refused,) = liar.send(
        side_channel.Describe(liar.proof(welcome), liar.layout, liar.memory(**lie))
    )
    assert "invalid description of its memory" in refused.reason
    assert list(producer.agent._peers) == ["D/0"]


def test_the_memory_of_another_instance_cannot_be_described(
    make: Callable[..., Any], producer: Producer
) -> None:
    honest = make(Consumer, producer, instance_id="D", handshake=False)
    liar = make(Consumer, producer, instance_id="E", handshake=False)
    (welcome,) = liar.send(liar.hello())
    (refused,) = liar.send(side_channel.Describe(liar.proof(welcome), liar.layout, honest.memory()))
    assert "its agent is called D/0" in refused.reason


def test_a_push_needs_described_memory(make: Callable[..., Any], producer: Producer) -> None:
    consumer = make(Consumer, producer, push=False)
    producer.offer()
    cancelled, _ = consumer.subscribe(slots=[1])
    assert "not described" in cancelled.reason


def test_each_peer_has_a_window_that_its_transfers_share(make: Callable[..., Any]) -> None:
    nbytes = 256  # of a block here
    producer = make(Producer, max_inflight_bytes=3 * nbytes)
    consumer, other = (make(Consumer, producer, rank=rank, push=True) for rank in (0, 1))
    for transfer_id, slots in (("long", list(range(8))), ("short", [10])):
        producer.offer(transfer_id)
        consumer.subscribe(transfer_id, slots=slots)
    producer.offer("elsewhere")
    other.subscribe("elsewhere", slots=[0])
    producer.save([0, 1, 2, 3, 4, 5, 6, 7], transfer_id="long", last=True)
    assert (producer.stats.inflight_bytes, producer.stats.queued_bytes) == (3 * nbytes, 5 * nbytes)
    producer.save([8], transfer_id="short", last=True)
    producer.save([9], transfer_id="elsewhere", last=True)
    assert [handle.peer for handle in producer.agent.held] == ["D/0", "D/1"], "peers share a window"
    ended = []
    while producer.agent.held:
        assert producer.stats.inflight_bytes <= 4 * nbytes
        producer.agent.let_go()
        producer.advance()
        ended += [message.transfer_id for message in consumer.received() if message.last]
    assert ended == ["short", "long"]
    assert (consumer.bytes[:8] == producer.memory.bytes[:8]).all()


def test_a_block_larger_than_the_window_is_written_alone(make: Callable[..., Any]) -> None:
    producer = make(Producer, max_inflight_bytes=1)
    consumer = make(Consumer, producer, push=True)
    producer.offer()
    consumer.subscribe(slots=[0, 1])
    producer.save([3, 4], last=True)
    assert len(producer.agent.held) == 1
    producer.let_writes_end()
    assert consumer.received()[-1].last


def test_a_release_is_confirmed_and_the_blocks_are_freed_once_no_write_is_in_flight(
    make: Callable[..., Any],
) -> None:
    producer = make(Producer, max_inflight_bytes=256)
    consumer = make(Consumer, producer, push=True)
    producer.offer()
    consumer.subscribe(slots=[0, 1, 2])
    producer.save([3, 4, 5], last=True)
    assert consumer.release() == []
    assert consumer.release() == []
    assert producer.finished == []
    producer.agent.let_go()
    producer.advance()
    assert consumer.received() == [Released("t", 7)]
    assert producer.agent.held == [], "a queued write was started after the release"
    assert producer.finished == ["t"]
    assert producer.stats.queued_bytes == 0


def test_a_cancellation_stops_writes_and_is_confirmed(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[0, 1])
    producer.save([3])
    producer.cancel()
    producer.save([4], first=1, last=True)
    assert consumer.received() == [Cancelled("t", 7, "cancelled by the producer")]
    producer.let_writes_end()
    assert consumer.received() == [Released("t", 7)]
    assert producer.finished == [], "the consumer may still read blocks that it could not verify"
    assert consumer.release() == []
    assert producer.finished == ["t"]


@pytest.mark.parametrize("offered", [False, True])
def test_every_refused_push_gets_a_confirmation(
    producer: Producer, consumer: Consumer, offered: bool
) -> None:
    if offered:
        producer.offer(peer="E")
        cancelled, released = consumer.subscribe(slots=[0])
    else:
        consumer.subscribe(slots=[0])
        producer.advance(LEASE_S)
        cancelled, released = consumer.received()
    assert isinstance(cancelled, Cancelled)
    assert released == Released("t", 7)


def test_a_dropped_early_push_is_confirmed_at_once(producer: Producer, consumer: Consumer) -> None:
    consumer.subscribe(slots=[0])
    assert consumer.release() == [Released("t", 7)]
    producer.offer()
    producer.save([3], last=True)
    assert producer.finished == ["t"]
    assert producer.agent.held == []


def test_the_end_of_the_lease_waits_for_writes_that_end(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[0])
    producer.save([3], last=True)
    producer.advance(LEASE_S)
    assert producer.finished == []
    producer.let_writes_end()
    assert producer.finished == ["t"]
    assert Released("t", 7) in consumer.received()


def test_the_end_of_the_lease_disconnects_writes_that_do_not_end(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[0])
    producer.save([3], last=True)
    producer.agent.frozen = True
    producer.advance(2 * LEASE_S)
    assert "D/0" not in producer.agent._peers
    assert producer.finished == [], "the transfer ended before its writes"
    producer.agent.fail_all("D/0")
    producer.advance()
    assert producer.finished == ["t"]
    assert isinstance(consumer.received()[-1], Refused)


def test_a_failed_write_ends_all_pushes_to_its_consumer_which_may_reconnect(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    pulling = make(Consumer, producer, instance_id="E")
    for transfer_id, peer in (("a", "D"), ("b", "D"), ("c", "E")):
        producer.offer(transfer_id, peer)
    consumer.subscribe("a", slots=[0])
    consumer.subscribe("b", slots=[1])
    pulling.subscribe("c")
    producer.save([3], transfer_id="a", last=True)
    producer.agent.let_go(fail=True)
    producer.advance()
    received = consumer.received()
    kinds = [type(message) for message in received]
    assert kinds == [Cancelled, Cancelled, Released, Refused], (
        "only b, without a write, is RELEASED"
    )
    assert "writing to the consumer failed" in received[0].reason
    producer.save([4], transfer_id="c", last=True)
    assert len(pulling.received()) == 1
    consumer.send_hello()
    producer.offer("again")
    consumer.subscribe("again", slots=[0])
    producer.save([5], transfer_id="again", last=True)
    producer.let_writes_end()
    assert consumer.received()[0].last
    producer.advance(LEASE_S)
    assert sorted(producer.finished) == ["a", "again", "b", "c"]


def test_a_failed_write_is_never_confirmed_because_it_may_still_arrive(
    producer: Producer, consumer: Consumer
) -> None:
    """The consumer keeps the slots until its fence. It fences when it is refused."""
    producer.offer()
    consumer.subscribe(slots=[0])
    producer.save([3], last=True)
    producer.agent.let_go(fail=True)
    producer.advance()
    producer.agent.let_failed_arrive()
    assert (consumer.bytes[0] == producer.memory.bytes[3]).all()
    assert [type(message) for message in consumer.received()] == [Cancelled, Refused]


def test_writes_to_a_consumer_end_when_it_reconnects(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[0, 1])
    producer.save([3])
    consumer.send_hello()
    assert producer.agent.held == [], "the write did not end with the agent"
    producer.save([4], first=1, last=True)
    assert producer.agent.held == []
    assert consumer.received() == []
    producer.advance(LEASE_S)
    assert producer.finished == ["t"]


def test_pushes_of_an_earlier_registration_do_not_reach_new_memory(
    make: Callable[..., Any],
) -> None:
    """After a fence the worker reconnects with new metadata under its old name."""
    producer = make(Producer, max_inflight_bytes=256)
    before = make(Consumer, producer, push=True)
    producer.offer()
    before.subscribe(slots=[0, 1])
    producer.save([3, 4])
    after = make(Consumer, producer, push=True)
    producer.agent.fail_all("D/0")
    for _ in range(5):
        producer.advance()
    assert producer.agent.held == []
    assert not after.bytes.any()
    assert [type(message) for message in before.received()] == [Cancelled]
    producer.offer("next")
    after.subscribe("next", slots=[0])
    producer.save([5], transfer_id="next", last=True)
    producer.let_writes_end()
    assert (after.bytes[0] == producer.memory.bytes[5]).all()


def test_consumers_reconnect_after_this_side_fenced_its_memory(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(slots=[0])
    producer.save([3], last=True)
    producer.agent.fail_all("D/0")
    producer.agent.fence()
    producer.side.fail_push_sessions()
    producer.advance()
    assert [type(message) for message in consumer.received()] == [Cancelled, Refused]


def test_a_write_that_cannot_be_posted_fails(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise TransportError("no")

    monkeypatch.setattr(producer.agent, "transfer", refuse)
    producer.offer()
    consumer.subscribe(slots=[0])
    producer.save([3], last=True)
    assert [type(message) for message in consumer.received()] == [Cancelled, Released, Refused]
    assert (producer.stats.queued_bytes, producer.stats.inflight_bytes) == (0, 0)


def test_two_workers_may_read_and_be_pushed_the_same_block(
    make: Callable[..., Any], producer: Producer
) -> None:
    pushed = make(Consumer, producer, rank=0, heads=HeadRange(0, 2), push=True)
    reading = make(Consumer, producer, rank=1, heads=HeadRange(2, 2))
    producer.offer()
    pushed.subscribe(worker=0, of=2, slots=[0])
    reading.subscribe(worker=1, of=2)
    producer.save([3], last=True)
    assert [message.written for message in reading.received()] == [False]
    reading.release(worker=1, of=2)
    assert producer.finished == []
    producer.let_writes_end()
    assert [message.written for message in pushed.received()] == [True]
    assert (pushed.bytes[0] == producer.memory.bytes[3, : pushed.bytes.shape[1]]).all()
    pushed.release(worker=0, of=2)
    assert producer.finished == ["t"]
    assert np.count_nonzero(pushed.bytes.any(axis=1)) == 1
