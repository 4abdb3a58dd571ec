"""Hostile peers affect only their own transfers, not this engine's thread, memory or others."""

from __future__ import annotations

import contextlib
import random
import typing
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any

import msgspec
import pytest

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import FailureReason, LoadResult
from baton_kv_transfer.memory.layout import HeadRange, RankAddress
from baton_kv_transfer.producer import producer_side as producer_side
from baton_kv_transfer.side_channel import (
    Cancelled,
    Heartbeat,
    Pending,
    Publish,
    Refused,
    Release,
    Subscribe,
)
from support.kv_transfer.consumer_rig import HOST, Rig, Staging, Worker, failures, tensor_parallel
from support.kv_transfer.consumer_rig import chain_hash as chain_hash_there
from support.kv_transfer.producer_rig import LEASE_S, Consumer, Producer, chain_hash


@pytest.fixture
def producer(made: Callable[[Any], Any]) -> Producer:
    return made(Producer())


@pytest.fixture
def consumer(made: Callable[[Any], Any], producer: Producer) -> Consumer:
    return made(Consumer(producer))


# The consumer's side


@pytest.mark.parametrize("theirs", [HeadRange(1, 1), HeadRange(1, 3)], ids=["fewer", "more"])
def test_contradicting_workers_of_a_producer_fail_only_the_load(
    made: Callable[[Any], Any], theirs: HeadRange
) -> None:
    """The first worker lists needed heads for the second one, which describes others."""
    right = HeadRange(2, 2)
    rig = made(Rig(heads=right, engine=[HeadRange(0, 2), right]))
    first, second = made([Worker("P", 0, HeadRange(0, 2)), Worker("P", 1, theirs)])
    addresses = [RankAddress(HOST, worker.port, worker.layout.heads) for worker in (first, second)]
    first.ranks = [addresses[0], RankAddress(HOST, second.port, right)]
    second.ranks = [RankAddress(HOST, first.port, HeadRange(0, 1)), addresses[1]]
    if theirs.end < right.end:
        second.ranks.append(RankAddress(HOST, 1, right))
    rig.begin("t", first, [3])
    rig.handshake(first)
    rig.handshake(second)
    assert failures(rig) == {FailureReason.PROTOCOL: 1}
    assert f"KV heads [1, {theirs.end}), " in rig.results["t"].error


def test_a_producer_without_a_valid_proof_is_disconnected(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [3])
    worker.receive(side_channel.Hello)
    worker.send(Pending(["x"] * side_channel.MAX_HANDSHAKE_BYTES))
    rig.receive()
    assert failures(rig) == {FailureReason.PROTOCOL: 1}
    assert "bytes" in rig.results["t"].error


def test_texts_of_peers_are_truncated(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [3])
    hello = worker.receive(side_channel.Hello)
    rig.deliver(worker, worker.welcome(hello, compatibility_hash="x" * 100_000))
    assert len(rig.results["t"].error) < 1000


def test_a_load_that_waits_for_slots_is_kept_alive_and_cancelled_at_the_producer(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    rig = made(Rig(memory=Staging(2), push=True))
    rig.subscribed("holds", worker, [1, 2])
    assert worker.receive(Heartbeat).transfer_ids == ["holds"]
    rig.begin("waits", worker, [3])
    rig.advance(5.0)
    assert worker.receive(Heartbeat).transfer_ids == ["holds", "waits"]
    rig.consumer.cancel("waits")
    release = worker.receive(Release)
    assert (release.transfer_id, release.completed) == ("waits", False)
    rig.advance()
    assert rig.results["waits"].error == "cancelled"


def test_small_pushed_loads_do_not_overtake_a_large_one_waiting_for_slots(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    staging = Staging(4)
    rig = made(Rig(memory=staging, push=True))
    holds = rig.subscribed("holds", worker, [1])
    rig.begin("large", worker, [3, 4, 5, 6])
    rig.begin("small", worker, [7])
    rig.deliver(worker, Cancelled("holds", holds.generation, "why not"))
    rig.deliver(worker, side_channel.Released("holds", holds.generation))
    assert worker.receive(Subscribe).transfer_id == "large"
    rig.consumer.cancel("large")
    rig.advance(20.0)
    assert staging.memory.num_free_slots == 4


def test_a_load_cancelled_while_waiting_for_slots_unblocks_the_next_one(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    rig = made(Rig(memory=Staging(4), push=True))
    rig.subscribed("holds", worker, [1])
    rig.begin("large", worker, [3, 4, 5, 6])
    rig.begin("small", worker, [7])
    rig.consumer.cancel("large")
    rig.advance()
    assert worker.receive(Subscribe).transfer_id == "small"


def test_a_large_read_uses_the_available_slots(made: Callable[[Any], Any], worker: Worker) -> None:
    staging = Staging(3)
    rig = made(Rig(memory=staging))
    taken = staging.memory.accept([20])
    subscribe = rig.subscribed("t", worker, range(10, 18))
    rig.deliver(worker, worker.published(subscribe, range(8), last=True))
    assert rig.results == {"t": LoadResult(8)}, (
        "the read must complete with fewer free slots than a batch"
    )
    assert taken is not None
    staging.memory.release(taken)
    assert staging.memory.num_free_slots == 3


def test_invalid_notifications_are_ignored(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [3, 4])
    worker.push_lists(subscribe.heads, pushed.layout)  # registers the consumer
    publish = worker.published(subscribe, [0, 1], written=True)
    other = msgspec.structs.replace(publish, generation=subscribe.generation - 1)
    for notification in (b"noise", side_channel.encode(Pending(["t"])), side_channel.encode(other)):
        worker.agent.send_notif("D/0", notification)
    pushed.advance()
    assert pushed.stats.checksum_failures == 0
    assert worker.write(subscribe, publish.blocks, pushed.layout) == "DONE"
    worker.agent.send_notif("D/0", side_channel.encode(publish))
    pushed.advance()
    assert pushed.results == {"t": LoadResult(2)}


# The producer's side


def test_untrusted_peers_may_send_only_small_messages(
    made: Callable[[Any], Any], producer: Producer
) -> None:
    stranger = made(Consumer(producer, handshake=False))
    much = Heartbeat(["x"] * side_channel.MAX_HANDSHAKE_BYTES)
    (refused,) = stranger.send(much)
    assert isinstance(refused, Refused)
    assert "bytes" in refused.reason
    stranger.send_hello()
    assert stranger.send(much) == []


def test_a_transfer_repeated_in_a_heartbeat_gets_one_response(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    assert consumer.heartbeat("t", "t", "t") == [Pending(["t"])]


def test_leases_end_while_an_untrusted_peer_floods(
    made: Callable[[Any], Any], producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "MAX_MESSAGES_PER_ROUND", 1)
    producer.offer()
    producer.save([3], last=True)
    stranger = made(Consumer(producer, handshake=False))
    for _ in range(int(LEASE_S + producer_side.MAX_UNREAD_S) + 2):
        for _ in range(3):
            stranger.socket.send(b"noise")
        producer.advance(1.0)
    assert producer.finished == ["t"]


def test_no_lease_ends_while_messages_of_its_consumer_are_unread(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3], last=True)
    producer.advance(LEASE_S - 0.5)
    monkeypatch.setattr(side_channel, "MAX_MESSAGES_PER_ROUND", 1)
    for transfer_id in ("u", "v", "t"):
        consumer.socket.send(side_channel.encode(Heartbeat([transfer_id])))
    for _ in range(4):
        producer.now += 0.4
        producer.finished += producer.side.run_round(producer.now)
    assert producer.finished == []


def test_a_worker_that_waits_for_memory_keeps_the_blocks(
    made: Callable[[Any], Any], producer: Producer
) -> None:
    here = made(Consumer(producer, rank=0, heads=HeadRange(0, 2)))
    waits = made(Consumer(producer, rank=1, heads=HeadRange(2, 2)))
    producer.offer()
    producer.save([3], last=True)
    here.subscribe(worker=0, of=2)
    for _ in range(3):
        producer.advance(LEASE_S - 1)
        here.heartbeat()
        waits.heartbeat()
    assert [type(message) for message in waits.subscribe(worker=1, of=2)] == [Publish]


def test_an_early_subscription_ends_with_its_session(
    made: Callable[[Any], Any], producer: Producer
) -> None:
    consumer = made(Consumer(producer, push=True))
    consumer.subscribe(slots=[5], generation=7)
    answers = consumer.send(consumer.hello())
    assert [type(answer) for answer in answers[:2]] == [Cancelled, side_channel.Released]
    consumer.send_hello()
    assert consumer.subscribe(slots=[5], generation=8) == []
    producer.offer()
    producer.save([3], last=True)
    producer.let_writes_end()
    assert [
        message.generation for message in consumer.received() if isinstance(message, Publish)
    ] == [8]


def test_a_repeated_subscription_does_not_confirm_writes_in_flight(
    made: Callable[[Any], Any], producer: Producer
) -> None:
    consumer = made(Consumer(producer, push=True))
    producer.offer()
    consumer.subscribe(slots=[5, 6])
    producer.save([3, 4])
    consumer.release()
    assert producer.agent.held, "a write is in flight"
    assert consumer.subscribe(slots=[5, 6]) == []
    producer.let_writes_end()
    assert [type(message) for message in consumer.received()] == [side_channel.Released]


# Random messages to both sides

NUMBERS = [-(2**63), -1, 0, 1, 2, 3, 7, 15, 24, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    "",
    "t",
    "u",
    "x" * 600,
    "DRAM",
    "VRAM",
    "float32",
    "bfloat16",
    "NHL2BD",
    "P",
    "D",
    "\0",
    HOST,
    "tcp://",
]
BYTES = [
    b"",
    b"x",
    bytes(32),
    bytes(1000),
    chain_hash(0),
    chain_hash_there("t", 0),
    chain_hash_there("t", 1),
]


def anything(rng: random.Random, kind: Any) -> Any:
    """Draw a value of this type. Few values are valid."""
    kind = getattr(kind, "__supertype__", kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = typing.get_type_hints(kind)
        return kind(**{name: anything(rng, fields[name]) for name in kind.__struct_fields__})
    if typing.get_origin(kind) is list:
        return [anything(rng, typing.get_args(kind)[0]) for _ in range(rng.choice([0, 1, 2, 5]))]
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return anything(rng, rng.choice(typing.get_args(kind)))
    floats = [0.0, -1.0, float("nan"), float("inf"), 5.0]
    values = {
        int: NUMBERS,
        str: TEXTS,
        bytes: BYTES,
        float: floats,
        bool: [False, True],
        type(None): [None],
    }
    return rng.choice(values[kind])


def mutated(rng: random.Random, message: Any) -> Any:
    """Draw a message with one or two changed fields, at any depth."""
    kinds = typing.get_type_hints(type(message))
    names = message.__struct_fields__
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 2]))):
        value = getattr(message, name)
        if isinstance(value, msgspec.Struct) and rng.random() < 0.8:
            value = mutated(rng, value)
        elif (
            isinstance(value, list)
            and value
            and isinstance(value[0], msgspec.Struct)
            and rng.random() < 0.7
        ):
            value = [mutated(rng, one) if rng.random() < 0.5 else one for one in value]
        else:
            value = anything(rng, kinds[name])
        message = msgspec.structs.replace(message, **{name: value})
    return message


def frames(rng: random.Random, messages: Iterator[Any]) -> Iterator[bytes]:
    """Encode a message, sometimes with a flipped bit."""
    for message in messages:
        with contextlib.suppress(OverflowError):  # outside the range of msgpack
            frame = bytearray(side_channel.encode(message))
            if rng.random() < 0.1:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            yield bytes(frame)


@pytest.mark.parametrize("seed", range(8))
def test_every_transfer_ends_for_any_messages_of_a_consumer(
    made: Callable[[Any], Any], producer: Producer, seed: int
) -> None:
    rng = random.Random(seed)
    evil = made(Consumer(producer, push=True))
    kinds = [side_channel.Hello, side_channel.Describe, Subscribe, Release, Heartbeat]

    def valid(transfer_id: str) -> Any:
        slots = rng.choice([None, [0, 1, 2], [3, 4]])
        subscribe = Subscribe(transfer_id, rng.choice([1, 7]), HeadRange(0, 4), 0, 1, 0, slots)
        return rng.choice([subscribe, Release(transfer_id, rng.choice([1, 7]), 0, 1, True)])

    def sent() -> Iterator[Any]:
        for turn in range(120):
            transfer_id = rng.choice(["t", "u"])
            if turn % 40 == 0:  # a valid handshake with a mutated end
                (welcome,) = [
                    one for one in evil.send(evil.hello()) if isinstance(one, side_channel.Welcome)
                ]
                describe = side_channel.Describe(evil.proof(welcome), evil.layout, evil.memory())
                yield describe if rng.random() < 0.6 else mutated(rng, describe)
            elif turn % 10 == 0:
                producer.offer(transfer_id)
                producer.save([rng.randrange(8)], last=rng.random() < 0.3, transfer_id=transfer_id)
            elif turn % 17 == 0:
                producer.let_writes_end()
            else:
                message = (
                    valid(transfer_id) if rng.random() < 0.7 else anything(rng, rng.choice(kinds))
                )
                yield mutated(rng, message) if rng.random() < 0.5 else message

    for frame in frames(rng, sent()):
        evil.send(frame)
    for transfer_id in ("t", "u"):
        producer.offer(transfer_id)
        producer.cancel(transfer_id)
    producer.advance(2 * LEASE_S)
    producer.let_writes_end()
    assert len(producer.finished) >= 2
    assert producer.memory.exposed == []
    assert (producer.stats.queued_bytes, producer.stats.inflight_bytes) == (0, 0)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_load_ends_correctly_for_any_messages_of_a_producer(
    made: Callable[[Any], Any], seed: int, push: bool
) -> None:
    rng = random.Random(seed)
    rig = made(Rig(push=push))  # checks every block that the load reports as valid
    (evil,) = made(tensor_parallel(1))
    kinds = [*typing.get_args(side_channel.ToConsumer)]
    for number in range(6):
        transfer_id = f"t{number}"
        # Its own one: earlier loads may still be running.
        blocks = [3 * number + block for block in range(rng.randrange(1, 4))]
        rig.begin(transfer_id, evil, blocks, first=rng.randrange(2))
        with contextlib.suppress(AssertionError):  # earlier messages may have broken the handshake
            if not any(peer.is_ready for peer in rig.consumer.peers()):
                rig.handshake(evil)
        subscriptions = [message for message in evil.poll() if isinstance(message, Subscribe)]

        def sent(subscriptions: list[Subscribe] = subscriptions) -> Iterator[Any]:
            for _ in range(6):
                message = anything(rng, rng.choice(kinds))
                if subscriptions:
                    subscribe = subscriptions[-1]
                    if rng.random() < 0.7:
                        some = rng.sample(range(4), rng.randrange(3))
                        message = evil.published(
                            subscribe, some, rng.random() < 0.3, rng.random() < 0.5
                        )
                        message = mutated(rng, message) if rng.random() < 0.5 else message
                    elif hasattr(message, "generation"):
                        message.transfer_id, message.generation = (
                            subscribe.transfer_id,
                            subscribe.generation,
                        )
                yield message

        for frame in frames(rng, sent()):
            evil.router.send_multipart([evil.identity, frame])
            rig.advance()
    for _ in range(6):
        rig.advance(20.0)
    assert rig.results.keys() == rig.requests.keys()
    assert (rig.stats.queued_bytes, rig.stats.inflight_bytes) == (0, 0)
