"""Subscriptions of consumers, and what the producer publishes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.producer import publisher
from baton_kv_transfer.side_channel import Cancelled
from support.kv_transfer.producer_rig import (
    Consumer,
    Producer,
    chain_hash,
    indices,
    layout,
)


def test_blocks_are_published_with_checksums_bound_to_the_load(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    assert consumer.subscribe(generation=9, first=1) == []
    producer.save([3, 4])
    producer.save([5], first=2, last=True)
    first, second = consumer.received()
    assert [(block.index, block.slot) for block in first.blocks] == [(1, 4)]
    assert [(block.index, block.slot) for block in second.blocks] == [(2, 5)]
    assert (first.last, second.last) == (False, True)
    heads = HeadRange(0, 4)
    (word_sum,) = producer.memory.block_sums([4], heads).tolist()
    expected = checksum.bind(
        word_sum, transfer_id="t", generation=9, chain_hash=chain_hash(1), heads=heads
    )
    assert first.blocks[0].checksum == expected
    assert consumer.release(generation=9) == []
    assert producer.finished == ["t"]
    assert producer.memory.exposed == []


def test_a_late_subscriber_gets_all_blocks_with_sums_of_one_call(
    make: Callable[..., Any], producer: Producer
) -> None:
    producer.offer()
    producer.save([3, 4])
    producer.save([5], first=2, last=True)
    assert producer.memory.sum_calls == [], "sums were computed before a subscription"
    left, right = (
        make(Consumer, producer, rank=rank, heads=HeadRange(2 * rank, 2)) for rank in (0, 1)
    )
    (publish,) = left.subscribe(worker=0, of=2)
    assert (indices([publish]), publish.last) == ([0, 1, 2], True)
    assert producer.memory.sum_calls == [(3, HeadRange(0, 2))]
    right.subscribe(worker=1, of=2)
    assert producer.memory.sum_calls == [(3, HeadRange(0, 2)), (3, HeadRange(2, 2))]


def test_many_blocks_are_published_in_parts_with_a_last_part(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "PART_BYTES", 2 * layout().block_nbytes)
    producer.offer()
    consumer.subscribe()
    producer.save([3, 4, 5, 6, 7], last=True)
    received = consumer.received()
    assert [[block.index for block in publish.blocks] for publish in received] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert [publish.last for publish in received] == [False, False, True]


def test_a_transfer_ends_when_all_workers_of_the_consumer_released_it(
    make: Callable[..., Any], producer: Producer
) -> None:
    left, right = (
        make(Consumer, producer, rank=rank, heads=HeadRange(2 * rank, 2)) for rank in (0, 1)
    )
    producer.offer()
    left.subscribe(worker=0, of=2)
    producer.save([3], last=True)
    left.release(worker=0, of=2)
    assert producer.finished == [], "the transfer ended without the other worker"
    right.subscribe(worker=1, of=2, generation=8)
    right.release(worker=1, of=2, generation=8)
    assert producer.finished == ["t"]


def test_a_load_without_blocks_releases_without_a_subscription(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.release("early")
    producer.offer("early")
    assert producer.finished == ["early"]
    producer.offer("late")
    consumer.release("late")
    assert producer.finished == ["early", "late"]


@pytest.mark.parametrize(
    "lie",
    [
        {"generation": 0},
        {"generation": -1},
        {"generation": 2**63},
        {"worker": 1},
        {"worker": -1},
        {"of": 0},
        {"of": 5},
        {"of": 2**63 - 1, "worker": 2**62},
        {"first": -1},
        {"heads": HeadRange(0, 5)},
        {"heads": HeadRange(1, 3)},
        {"heads": HeadRange(-1, 4)},
        {"heads": HeadRange(0, 0)},
        {"heads": HeadRange(2**62, 2**62)},
        {"slots": [0]},
        {"transfer_id": ""},
        {"transfer_id": "t" * 10_000},
    ],
    ids=str,
)
def test_an_invalid_subscription_is_refused(
    producer: Producer, consumer: Consumer, lie: dict[str, Any]
) -> None:
    producer.offer()
    (cancelled, *_) = consumer.subscribe(**lie)
    assert isinstance(cancelled, Cancelled)
    assert producer.finished == []
    assert consumer.subscribe() == [], "the invalid subscription ended the transfer"


def test_heads_that_the_workers_do_not_share_count_as_refused_descriptors(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    (cancelled,) = consumer.subscribe(heads=HeadRange(0, 4))
    assert "[0, 4)" in cancelled.reason
    assert "[0, 2)" in cancelled.reason
    assert producer.stats.descriptors_refused == 1


def test_a_second_worker_of_the_same_rank_is_refused(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(generation=7)
    second = make(Consumer, producer)
    (cancelled,) = second.subscribe(generation=8)
    assert "exists already" in cancelled.reason
    assert cancelled.generation == 8
    assert consumer.subscribe(generation=7) == [], "a repeated subscription must be ignored"
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]
    assert second.received() == []
    second.release(generation=8)
    second.release(generation=7)
    assert producer.finished == []
    consumer.release(generation=7)
    assert producer.finished == ["t"]


def test_a_worker_with_another_number_of_workers_is_refused_with_both_numbers(
    make: Callable[..., Any], producer: Producer
) -> None:
    left, right = (
        make(Consumer, producer, rank=rank, heads=HeadRange(2 * rank, 2)) for rank in (0, 1)
    )
    producer.offer()
    left.subscribe(worker=0, of=2)
    (cancelled,) = right.subscribe(worker=1, of=3)
    assert "2 subscribers, not 3" in cancelled.reason
    assert right.subscribe(worker=1, of=2) == []


def test_a_release_of_another_generation_is_ignored(producer: Producer, consumer: Consumer) -> None:
    producer.offer()
    consumer.subscribe(generation=7)
    producer.save([3], last=True)
    for generation in (6, 8, 0, -7, 2**64 - 1):
        consumer.release(generation=generation)
    assert producer.finished == []
    consumer.release(generation=7)
    consumer.release(generation=7)
    assert producer.finished == ["t"]


def test_a_released_load_cannot_subscribe_again(
    make: Callable[..., Any], producer: Producer
) -> None:
    left = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    left.release(worker=0, of=2)
    (cancelled,) = left.subscribe(worker=0, of=2)
    assert "released" in cancelled.reason
    assert producer.finished == []


def test_other_peers_can_neither_load_nor_end_a_transfer(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    untrusted = make(Consumer, producer, instance_id="E")
    producer.offer()
    (cancelled,) = untrusted.subscribe()
    assert "offered to instance D, not to E" in cancelled.reason
    untrusted.release()
    assert producer.finished == []
    assert consumer.subscribe() == []
