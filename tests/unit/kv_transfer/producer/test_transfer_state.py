"""The leases of transfers and subscribers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.side_channel import Cancelled, Pending
from support.kv_transfer.producer_rig import LEASE_S, Consumer, Producer


def test_a_transfer_without_a_consumer_ends_a_lease_after_the_last_save(
    producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    producer.offer()
    producer.advance(5 * LEASE_S)
    assert producer.finished == [], "no block is kept while the consumer waits"
    producer.save([3])
    producer.advance(LEASE_S - 1)
    producer.save([4], first=1, last=True)
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(1)
    assert producer.finished == ["t"]
    assert producer.stats.leases_expired == 1
    assert f"lease has ended (no renewal for {LEASE_S:.1f} s)" in caplog.text


def test_a_subscriber_without_heartbeats_keeps_blocks_for_one_lease(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    producer.save([3], last=True)
    consumer.subscribe()
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(1)
    assert producer.finished == ["t"]
    assert any(
        "lease" in message.reason
        for message in consumer.received()
        if isinstance(message, Cancelled)
    )


def test_heartbeats_keep_blocks_and_get_pending_while_prefill_runs(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    for _ in range(3):
        producer.advance(LEASE_S - 1)
        assert consumer.heartbeat() == [Pending(["t"])]
    producer.save([3], last=True)
    consumer.received()
    for _ in range(3):
        producer.advance(LEASE_S - 1)
        assert consumer.heartbeat() == []
    assert producer.finished == []
    producer.advance(LEASE_S)
    assert producer.finished == ["t"]


def test_a_load_that_waits_for_memory_gets_pending_until_the_transfer_has_blocks(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    assert consumer.heartbeat() == [Pending(["t"])]
    producer.save([3])
    assert consumer.heartbeat() == []


def test_heartbeats_keep_blocks_up_to_a_limit(
    producer: Producer, consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3], last=True)
    for _ in range(100):
        producer.advance(LEASE_S - 1)
        consumer.heartbeat()
    assert producer.finished == ["t"]
    assert "lease has ended (renewed up to the limit of 600 s)" in caplog.text


def test_a_missing_worker_ends_the_transfer_after_one_lease(
    make: Callable[..., Any], producer: Producer
) -> None:
    left = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    left.subscribe(worker=0, of=2)
    producer.save([3], last=True)
    received = [
        message for _ in range(3) for message in (producer.advance(LEASE_S / 2), *left.heartbeat())
    ]
    assert Cancelled("t", 7, "its lease expired") in received
    assert producer.finished == []
    left.release(worker=0, of=2)
    assert producer.finished == ["t"]


def test_messages_sent_during_a_stall_are_read_before_a_lease_ends(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3])
    producer.now += 3 * LEASE_S
    # Time for messages in the network to arrive.
    producer.finished += producer.side.run_round(producer.now)
    assert producer.finished == []
    consumer.heartbeat()
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(2)
    assert producer.finished == ["t"]
