"""Two engines' connectors in two processes over UCX: every way a transfer can end, and that both sides live on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton_protocol.config import KVRole
from support.kv_transfer.kv_processes import LAYOUT, Engine
from support.waiting import eventually


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Starts engines; all are stopped at the end, and a process that died by itself fails the test."""
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
def either(engine: Callable[..., Engine], mode: str) -> tuple[Engine, Engine]:
    """As `pair`, whose blocks are read or written."""
    return engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER, mode=mode)


def hand_over(producer: Engine, consumer: Engine, transfer_id: str) -> None:
    """One whole transfer that must succeed: proves that both sides still work."""
    producer.offer(transfer_id, consumer.instance_id)
    consumer.load(transfer_id, producer, [1, 2])
    producer.save(transfer_id, 0, [5, 6], last=True)
    result = consumer.result(transfer_id)
    assert (result.num_valid_blocks, result.error) == (2, "")
    assert consumer.call("holds", 1, 1)
    assert consumer.call("holds", 2, 2)
    producer.wait_sent(transfer_id)


def test_blocks_arrive_chunk_by_chunk_while_prefill_runs(either: tuple[Engine, Engine]) -> None:
    producer, consumer = either
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
    assert (stats.transfers_completed, stats.transfers_failed) == (1, 0)
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
def test_stats_name_what_moved_the_bytes(
    engine: Callable[..., Engine], mode: str, transport: str, carrier: str
) -> None:
    producer = engine("P", KVRole.PRODUCER, transport=transport)
    consumer = engine("D", KVRole.CONSUMER, transport=transport, mode=mode)
    hand_over(producer, consumer, "t")
    assert consumer.call("stats").bytes_moved == {carrier: 2 * LAYOUT.block_nbytes}
    if transport in ("ucx", "tcp"):  # of the others only the side that posted or copied counts
        assert producer.call("stats").bytes_moved == {carrier: 2 * LAYOUT.block_nbytes}


def test_a_subscription_waits_for_the_offer(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    hand_over(producer, consumer, "warm-up")
    consumer.load("t", producer, [1])
    hand_over(producer, consumer, "later")  # the subscription of t went ahead of this one's
    producer.offer("t", "D")
    producer.save("t", 0, [7], last=True)
    assert consumer.result("t").num_valid_blocks == 1


def test_blocks_of_the_consumers_prefix_cache_are_not_fetched(
    either: tuple[Engine, Engine],
) -> None:
    producer, consumer = either
    producer.offer("t", "D")
    consumer.load("t", producer, [11, 12], first=3)
    producer.save("t", 0, [0, 1, 2, 3, 4], last=True)
    assert consumer.result("t").num_valid_blocks == 2
    assert consumer.call("stats").blocks_received == 2
    assert consumer.call("holds", 11, 4)


@pytest.mark.parametrize("offered_first", [True, False])
def test_a_load_of_nothing_frees_the_producer(
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


def test_corrupted_block_is_not_accepted(either: tuple[Engine, Engine]) -> None:
    producer, consumer = either
    producer.offer("t", "D")
    producer.call("damage_once_summed", 31)
    producer.save("t", 0, [30, 31, 32], last=True)
    consumer.load("t", producer, [1, 2, 3])
    result = consumer.result("t")
    assert result.num_valid_blocks == 1
    assert "checksum" in result.error
    assert consumer.call("stats").checksum_failures == 2, "read again once before giving up"
    producer.wait_sent("t")


def test_right_bytes_of_the_wrong_tokens_are_not_accepted(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2], of="other")
    producer.save("t", 0, [5, 6], last=True)
    result = consumer.result("t")
    assert result.num_valid_blocks == 0
    assert "other tokens" in result.error
    assert consumer.call("stats").failures == {"other_prompt": 1}
    producer.wait_sent("t")


def test_fewer_blocks_than_asked_for_is_an_error(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2, 3])
    producer.save("t", 0, [5], last=True)
    assert "1 of the 3 requested blocks" in consumer.result("t").error
    assert consumer.call("stats").failures == {"other_prompt": 1}


def test_killed_producer_fails_the_load_at_once(engine: Callable[..., Engine], mode: str) -> None:
    producer, consumer = engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER, mode=mode)
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2, 3])
    producer.save("t", 0, [5], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 1, "first block")
    producer.kill()
    result = consumer.result("t", timeout_s=5)
    assert result.num_valid_blocks == 1
    assert "lost" in result.error
    hand_over(engine("P2", KVRole.PRODUCER), consumer, "next")


def test_unreachable_producer_fails_the_load(engine: Callable[..., Engine]) -> None:
    producer, consumer = engine("P", KVRole.PRODUCER), engine("D", KVRole.CONSUMER)
    producer.kill()
    consumer.load("t", producer, [1])
    assert "failed" in consumer.result("t").error


def test_killed_consumer_costs_the_producer_one_lease(
    engine: Callable[..., Engine], mode: str
) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER, lease_s=2.0),
        engine("D", KVRole.CONSUMER, mode=mode),
    )
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2, 3])
    producer.save("t", 0, [5], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 1, "first block")
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
    assert (
        "no progress" in consumer.result("never-offered").error
    )  # for three leases nothing happens
    producer.save("t", 0, [5], last=True)
    assert consumer.result("t").error == ""
    producer.wait_sent("t")
    assert producer.call("stats").leases_expired == 0


def test_a_transfer_never_offered_is_refused_by_deadline(engine: Callable[..., Engine]) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER),
        engine("D", KVRole.CONSUMER, load_timeout_s=1.0),
    )
    consumer.load("t", producer, [1])
    assert consumer.result("t").error


def test_only_the_offered_peer_gets_the_blocks(engine: Callable[..., Engine]) -> None:
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


def test_incompatible_engines_refuse_each_other_naming_both_hashes(
    engine: Callable[..., Engine],
) -> None:
    producer = engine("P", KVRole.PRODUCER, compatibility_hash="model-a")
    consumer = engine("D", KVRole.CONSUMER, compatibility_hash="model-b")
    consumer.load("t", producer, [1])
    error = consumer.result("t").error
    assert "model-a" in error
    assert "model-b" in error


def test_consumer_cancels(either: tuple[Engine, Engine]) -> None:
    producer, consumer = either
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2])
    producer.save("t", 0, [5], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 1, "first block")
    consumer.cancel("t")
    assert consumer.result("t").error == "cancelled"
    producer.wait_sent("t")
    producer.save("t", 1, [6], last=True)  # the scheduler's view lags behind: no harm
    hand_over(producer, consumer, "next")


def test_producer_cancels(either: tuple[Engine, Engine]) -> None:
    producer, consumer = either
    producer.offer("t", "D")
    consumer.load("t", producer, [1, 2])
    producer.save("t", 0, [5], last=False)
    eventually(lambda: consumer.call("stats").blocks_received == 1, "first block")
    producer.cancel("t")
    assert "cancelled by the producer" in consumer.result("t").error
    producer.wait_sent("t")
    assert producer.call("stats").leases_expired == 0, (
        "the consumer's acknowledgement ends it, not the lease"
    )


def test_cancel_before_anyone_subscribed_ends_at_once_and_is_told_later(
    pair: tuple[Engine, Engine],
) -> None:
    producer, consumer = pair
    producer.offer("t", "D")
    producer.cancel("t")
    producer.wait_sent("t")
    consumer.load("t", producer, [1])
    assert "cancelled by the producer" in consumer.result("t").error


def test_many_small_transfers_leak_nothing(either: tuple[Engine, Engine]) -> None:
    producer, consumer = either
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


def test_a_producer_restarted_on_the_same_address_is_a_new_peer(
    engine: Callable[..., Engine],
) -> None:
    first, consumer = engine("P1", KVRole.PRODUCER), engine("D", KVRole.CONSUMER)
    hand_over(first, consumer, "a")
    first.kill()
    second = engine("P2", KVRole.PRODUCER, port=first.port)
    hand_over(second, consumer, "b")
    consumer.load("c", first, [1])  # whoever still means the dead instance is told so
    error = consumer.result("c").error
    assert "P1" in error
    assert "P2" in error
    assert consumer.call("stats").failures == {"peer_lost": 1}
    hand_over(second, consumer, "d")
