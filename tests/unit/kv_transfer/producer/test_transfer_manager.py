"""Transfers as the producer's scheduler sees them: slots, cancellations and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton_kv_transfer.side_channel import Cancelled
from support.kv_transfer.producer_rig import LEASE_S, Consumer, Producer, indices


def test_a_cancelled_transfer_ends_with_the_consumers_acknowledgement(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3])
    producer.cancel()
    producer.advance()
    assert Cancelled("t", 7, "cancelled by the producer") in consumer.received()
    producer.save([4], first=1, last=True)
    assert consumer.heartbeat() == []
    assert producer.finished == []
    consumer.release()
    assert producer.finished == ["t"]


def test_an_unacknowledged_cancellation_ends_with_the_lease(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.cancel()
    for _ in range(3):
        producer.advance(LEASE_S / 2)
        consumer.heartbeat()
    assert producer.finished == ["t"]


def test_a_repeated_offer_is_ignored(producer: Producer, consumer: Consumer) -> None:
    producer.offer()
    consumer.subscribe()
    producer.offer(peer="E")
    consumer.release()
    assert producer.finished == ["t"]
    producer.offer()
    consumer.release(generation=8)
    assert producer.finished == ["t", "t"], "an ended transfer cannot be offered again"


def test_publishing_waits_for_slots_and_transfers_with_slots_go_first(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    producer.memory.free = 3
    for transfer_id in ("a", "b"):
        producer.offer(transfer_id)
        consumer.subscribe(transfer_id)
    producer.save([1, 2], transfer_id="a")
    producer.save([3, 4], last=True, transfer_id="b")
    producer.save([5], first=2, last=True, transfer_id="a")
    assert [message.transfer_id for message in consumer.received()] == ["a", "a"]
    (publish,) = consumer.release("a")
    assert producer.finished == ["a"]
    assert (publish.transfer_id, indices([publish])) == ("b", [0, 1])
    consumer.release("b")
    assert producer.memory.exposed == []


def test_small_transfers_do_not_overtake_a_large_one_waiting_for_slots(
    producer: Producer,
) -> None:
    producer.memory.free = 2
    for transfer_id, block_ids in (("large", [1, 2, 3]), ("small", [4])):
        producer.offer(transfer_id)
        producer.save(block_ids, last=True, transfer_id=transfer_id)
    producer.advance()
    assert producer.memory.exposed == []
    producer.memory.free = 3
    producer.advance()
    assert producer.memory.exposed == [1, 2, 3]


def test_a_transfer_without_slots_ends_with_a_reason(
    producer: Producer, consumer: Consumer
) -> None:
    producer.memory.free = 1
    producer.offer()
    consumer.subscribe()
    producer.save([1, 2])
    for _ in range(3):
        producer.advance(LEASE_S / 2)
        consumer.heartbeat()
    consumer.release()
    assert producer.finished == ["t"]


def test_a_transfer_that_can_never_fit_is_cancelled_at_once(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.memory.num_slots = 3
    producer.save([1, 2])
    consumer.received()
    producer.save([3, 4], first=2)
    (cancelled,) = consumer.received()
    assert "4 blocks do not fit into the producer's 3 slots" in cancelled.reason
    consumer.release()
    assert producer.finished == ["t"]


def test_after_a_defect_every_transfer_ends(producer: Producer, consumer: Consumer) -> None:
    producer.offer("a")
    producer.offer("b")
    consumer.subscribe("a")
    assert sorted(producer.side.transfers.end_all()) == ["a", "b"]
