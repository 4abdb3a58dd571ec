"""Connectors of two engines in two processes over UCX: all ends of transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton_protocol.options.config import KVRole
from support.kv_transfer.kv_processes import LAYOUT, Engine
from support.waiting import eventually


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Return a function that starts engines. A process that dies by itself fails the test."""
    with contextlib.ExitStack() as stack:

        def start(instance_id: str, role: KVRole, **options: Any) -> Engine:
            started = Engine(instance_id, role, **options)
            stack.callback(started.stop)
            return started

        yield start


@pytest.fixture
def pair(engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER)


@pytest.fixture(params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture
def push_or_pull(engine: Callable[..., Engine], mode: str) -> tuple[Engine, Engine]:
    """A pair of engines, with pull and with push."""
    return engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER, mode=mode)


def hand_over(producer: Engine, consumer: Engine, transfer_id: str) -> None:
    """Check that a whole transfer succeeds, so both sides still work."""
    producer.offer(transfer_id, consumer.instance_id)
    consumer.load(transfer_id, producer, [1, 2])
    producer.save(transfer_id, 0, [5, 6], last=True)
    result = consumer.result(transfer_id)
    assert (result.num_valid_blocks, result.error) == (2, "")
    assert consumer.call("holds", 1, 1)
    assert consumer.call("holds", 2, 2)
    producer.wait_sent(transfer_id)


def load_first_block(producer: Engine, consumer: Engine) -> None:
    """Start a transfer of three blocks, and wait until the first one has arrived."""
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2, 3])
    producer.save("t", 0, [5], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 1, "first block")


def test_blocks_arrive_chunk_by_chunk_during_prefill(push_or_pull: tuple[Engine, Engine]) -> None:
    producer, consumer = push_or_pull
    producer.offer("t", "D")
    consumer.load("t", producer, [40, 3, 17, 4, 5, 6])
    producer.save("t", 0, [9, 8], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 2, "first chunk")
    assert "t" not in consumer.call("poll")[1]
    producer.save("t", 2, [20, 21, 22], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 5, "second chunk")
    assert not producer.sent("t")
    producer.save("t", 5, [1], last=True)
    assert consumer.result("t").error == ""
    assert consumer.result("t").num_valid_blocks == 6
    for index, block_id in enumerate([40, 3, 17, 4, 5, 6]):
        assert consumer.call("holds", block_id, index + 1)
    producer.wait_sent("t")
    stats = consumer.call("stats")
    assert stats.bytes_received == 6 * LAYOUT.block_nbytes
    assert (stats.transfers_completed, stats.failures) == (1, {})
    assert producer.call("stats").blocks_sent == 6


@pytest.mark.parametrize(
    ("transport", "carrier"),
    [
        ("ucx", "ucx tcp/lo"),
        ("tcp", "tcp sockets"),
        ("shm", "shm process_vm_readv"),
        ("auto", "shm process_vm_readv"),
        ("nixl", "nixl unknown"),
    ],
)
def test_stats_count_bytes_by_transport(
    engine: Callable[..., Engine], mode: str, transport: str, carrier: str
) -> None:
    producer = engine("P", KVRole.PRODUCER, transport=transport)
    consumer = engine("D", KVRole.CONSUMER, transport=transport, mode=mode)
    hand_over(producer, consumer, "t")
    assert consumer.call("stats").bytes_moved == {carrier: 2 * LAYOUT.block_nbytes}
    if transport in ("ucx", "tcp"):  # with the others only the side that posts or copies counts
        assert producer.call("stats").bytes_moved == {carrier: 2 * LAYOUT.block_nbytes}


def test_a_subscription_waits_for_the_offer(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    hand_over(producer, consumer, "warm-up")
    consumer.load("t", producer, [1])
    hand_over(producer, consumer, "later")  # the subscription of t was sent before this one
    producer.offer("t", "D")
    producer.save("t", 0, [7], last=True)
    assert consumer.result("t").num_valid_blocks == 1


def test_blocks_of_the_consumers_prefix_cache_are_not_fetched(
    push_or_pull: tuple[Engine, Engine],
) -> None:
    producer, consumer = push_or_pull
    producer.offer("t", "D")
    consumer.load("t", producer, [11, 12], first=3)
    producer.save("t", 0, [0, 1, 2, 3, 4], last=True)
    assert consumer.result("t").num_valid_blocks == 2
    assert consumer.call("stats").blocks_received == 2
    assert consumer.call("holds", 11, 4)


@pytest.mark.parametrize("offered_first", [True, False])
def test_a_load_without_blocks_releases_the_producer(
    pair: tuple[Engine, Engine], offered_first: bool
) -> None:
    producer, consumer = pair
    if offered_first:
        producer.offer("t", "D")
    consumer.load("t", producer, [])
    result = consumer.result("t")
    assert (result.num_valid_blocks, result.error) == (0, "")
    if not offered_first:
        producer.offer("t", "D")
    producer.wait_sent("t")


def test_a_corrupted_block_is_not_accepted(push_or_pull: tuple[Engine, Engine]) -> None:
    producer, consumer = push_or_pull
    producer.offer("t", "D")
    producer.call("damage_once_summed", 31)
    producer.save("t", 0, [30, 31, 32], last=True)
    consumer.load("t", producer, [1, 2, 3])
    result = consumer.result("t")
    assert result.num_valid_blocks == 1
    assert "checksum" in result.error
    assert consumer.call("stats").checksum_failures == 2, "the block was not read again"
    producer.wait_sent("t")


def test_blocks_of_other_tokens_are_not_accepted(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2], of="other")
    producer.save("t", 0, [5, 6], last=True)
    result = consumer.result("t")
    assert result.num_valid_blocks == 0
    assert "other tokens" in result.error
    assert consumer.call("stats").failures == {"other_prompt": 1}
    producer.wait_sent("t")


def test_fewer_blocks_than_requested_are_an_error(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2, 3])
    producer.save("t", 0, [5], last=True)
    assert "1 of the 3 requested blocks" in consumer.result("t").error
    assert consumer.call("stats").failures == {"other_prompt": 1}


def test_a_killed_producer_fails_the_load_at_once(engine: Callable[..., Engine], mode: str) -> None:
    producer, consumer = engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER, mode=mode)
    load_first_block(producer, consumer)
    producer.kill()
    result = consumer.result("t", timeout_s=5)
    assert result.num_valid_blocks == 1
    assert "lost" in result.error
    hand_over(engine("P2", KVRole.PRODUCER), consumer, "next")


def test_an_unreachable_producer_fails_the_load(engine: Callable[..., Engine]) -> None:
    producer, consumer = engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER)
    producer.kill()
    consumer.load("t", producer, [1])
    assert "failed" in consumer.result("t").error


def test_a_killed_consumer_keeps_blocks_for_one_lease(
    engine: Callable[..., Engine], mode: str
) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER, lease_s=2.0),
        engine("D", KVRole.CONSUMER, mode=mode),
    )
    load_first_block(producer, consumer)
    consumer.kill()
    producer.wait_sent("t")
    assert producer.call("stats").leases_expired == 1
    hand_over(producer, engine("D2", KVRole.CONSUMER), "next")


def test_heartbeats_keep_the_lease(engine: Callable[..., Engine]) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER, lease_s=1.5),
        engine("D", KVRole.CONSUMER, load_timeout_s=4.5),
    )
    producer.offer("t", "D")
    consumer.load("t", producer, [1])
    consumer.load("never-offered", producer, [2])
    # For three leases nothing happens.
    assert "no progress" in consumer.result("never-offered").error
    producer.save("t", 0, [5], last=True)
    assert consumer.result("t").error == ""
    producer.wait_sent("t")
    assert producer.call("stats").leases_expired == 0


def test_a_load_without_an_offer_is_refused_at_the_deadline(engine: Callable[..., Engine]) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER),
        engine("D", KVRole.CONSUMER, load_timeout_s=1.0),
    )
    consumer.load("t", producer, [1])
    assert consumer.result("t").error


def test_only_the_peer_of_the_offer_gets_the_blocks(engine: Callable[..., Engine]) -> None:
    producer, stranger, consumer = (
        engine("P", KVRole.PRODUCER),
        engine("E", KVRole.CONSUMER),
        engine("D", KVRole.CONSUMER),
    )
    producer.offer("t", "D")
    producer.save("t", 0, [5], last=True)
    stranger.load("t", producer, [1])
    error = stranger.result("t").error
    assert "offered to instance D" in error
    assert "not to E" in error
    assert not producer.sent("t")
    consumer.load("t", producer, [1])
    assert consumer.result("t").error == ""


def test_incompatible_engines_refuse_each_other_with_both_hashes(
    engine: Callable[..., Engine],
) -> None:
    producer = engine("P", KVRole.PRODUCER, compatibility_hash="model-a")
    consumer = engine("D", KVRole.CONSUMER, compatibility_hash="model-b")
    consumer.load("t", producer, [1])
    error = consumer.result("t").error
    assert "model-a" in error
    assert "model-b" in error


def test_a_consumer_may_cancel(push_or_pull: tuple[Engine, Engine]) -> None:
    producer, consumer = push_or_pull
    load_first_block(producer, consumer)
    consumer.cancel("t")
    assert consumer.result("t").error == "cancelled"
    producer.wait_sent("t")
    producer.save("t", 1, [6], last=True)  # a late cancellation is ignored
    hand_over(producer, consumer, "next")


def test_a_producer_may_cancel(push_or_pull: tuple[Engine, Engine]) -> None:
    producer, consumer = push_or_pull
    load_first_block(producer, consumer)
    producer.cancel("t")
    assert "cancelled by the producer" in consumer.result("t").error
    producer.wait_sent("t")
    assert producer.call("stats").leases_expired == 0, (
        "the transfer did not end with the acknowledgement"
    )


def test_a_cancellation_before_the_subscription_ends_at_once(
    pair: tuple[Engine, Engine],
) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    producer.cancel("t")
    producer.wait_sent("t")
    consumer.load("t", producer, [1])
    assert "cancelled by the producer" in consumer.result("t").error


def test_many_small_transfers_leak_no_resources(push_or_pull: tuple[Engine, Engine]) -> None:
    producer, consumer = push_or_pull
    hand_over(producer, consumer, "warm-up")
    before = producer.call("num_open_files"), consumer.call("num_open_files")
    for number in range(200):
        producer.offer(f"t{number}", "D")
        consumer.load(f"t{number}", producer, [number % LAYOUT.num_blocks])
        producer.save(f"t{number}", 0, [number % 7], last=True)
    for number in range(200):
        assert consumer.result(f"t{number}").error == ""
        producer.wait_sent(f"t{number}")
    assert (producer.call("num_open_files"), consumer.call("num_open_files")) == before


def test_a_producer_restarted_at_the_same_address_is_a_new_peer(
    engine: Callable[..., Engine],
) -> None:
    first, consumer = engine("P1", KVRole.PRODUCER), engine("D", KVRole.CONSUMER)
    hand_over(first, consumer, "a")
    first.kill()
    second = engine("P2", KVRole.PRODUCER, port=first.port)
    hand_over(second, consumer, "b")
    consumer.load("c", first, [1])  # a load of the dead instance is refused
    error = consumer.result("c").error
    assert "P1" in error
    assert "P2" in error
    assert consumer.call("stats").failures == {"peer_lost": 1}
    hand_over(second, consumer, "d")
