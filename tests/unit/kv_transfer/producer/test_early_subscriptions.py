"""Subscriptions and releases that arrive before the offer of their transfer."""

from __future__ import annotations

import pytest

from baton_kv_transfer.producer import early_subscriptions
from baton_kv_transfer.side_channel import Cancelled
from support.kv_transfer.producer_rig import (
    LEASE_S,
    Consumer,
    Producer,
    indices,
)


def test_a_subscription_waits_for_the_offer_and_is_refused_after_the_end(
    producer: Producer, consumer: Consumer
) -> None:
    assert consumer.subscribe() == []
    producer.offer()
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]
    consumer.release()
    (cancelled,) = consumer.subscribe(generation=8)
    assert cancelled == Cancelled("t", 8, "transfer t has ended: released")


def test_a_subscription_without_an_offer_is_refused_after_a_lease(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.subscribe()
    producer.advance(LEASE_S / 2)
    consumer.heartbeat()
    producer.advance(LEASE_S / 2)
    assert consumer.received() == []
    producer.advance(LEASE_S / 2)
    (cancelled,) = consumer.received()
    assert "was not offered" in cancelled.reason


def test_the_number_of_early_subscriptions_is_limited(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_subscriptions, "MAX_EARLY", 3)
    for number in range(3):
        assert consumer.subscribe(f"t{number}") == []
    (cancelled,) = consumer.subscribe("t3")
    assert "retry later" in cancelled.reason
    producer.offer("t0")
    assert consumer.subscribe("t3") == []
    producer.advance(2 * LEASE_S)
    assert len(producer.side.transfers._early) == 0


def test_a_release_before_the_offer_ends_the_transfer_at_the_offer(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.subscribe(generation=7)
    consumer.release(generation=6)
    consumer.release(generation=7)
    producer.offer()
    assert producer.finished == ["t"]
