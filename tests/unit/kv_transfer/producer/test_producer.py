"""A producer with scripted consumers: handshakes, subscriptions, leases and cancellations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.producer import early_messages, publisher, sessions
from baton_kv_transfer.side_channel import Cancelled, Pending, Publish, Refused, Welcome
from baton_protocol.service_key import ServiceKey
from support.kv_transfer.scripted_consumer import LEASE_S, Consumer, Producer, chain_hash, layout
from support.waiting import eventually


@pytest.fixture
def consumer(make: Callable[..., Any], producer: Producer) -> Consumer:
    made: Consumer = make(Consumer, producer)
    return made


def num_sessions(producer: Producer) -> int:
    sessions = producer.side._sessions
    return len(sessions._pending) + len(sessions._open)


def indices(messages: list[Any]) -> list[int]:
    return [
        block.index
        for message in messages
        if isinstance(message, Publish)
        for block in message.blocks
    ]


# The handshake


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ({"version": 1}, ["version", "1", "2"]),
        ({"compatibility_hash": "other"}, ["compatibility hash", "c", "other"]),
        ({"peer_instance_id": "the one before"}, ["instance id", "P", "the one before"]),
        ({"nonce": b""}, ["nonce of 32 bytes", "0"]),
        ({"instance_id": ""}, ["instance id"]),
    ],
)
def test_an_incompatible_hello_is_refused_with_both_values(
    make: Callable[..., Any], producer: Producer, lie: dict[str, Any], named: list[str]
) -> None:
    consumer = make(Consumer, producer, greet=False)
    (refused,) = consumer.send(consumer.hello(**lie))
    assert isinstance(refused, Refused)
    assert all(name in refused.reason for name in named), refused.reason
    assert refused.succeeded == ("peer_instance_id" in lie)
    assert producer.stats.handshakes_refused == 1


RIGHT, WRONG = ServiceKey(b"the right service's key"), ServiceKey(b"the wrong service's key")


@pytest.mark.parametrize(("ours", "theirs"), [(RIGHT, WRONG), (RIGHT, None), (None, RIGHT)])
def test_memory_is_described_only_after_the_proof_of_the_token(
    make: Callable[..., Any], ours: ServiceKey | None, theirs: ServiceKey | None
) -> None:
    producer = make(Producer, service_key=ours)
    trusted = make(Consumer, producer, token=auth.derive_token(ours))
    assert trusted.description is not None
    untrusted = make(Consumer, producer, token=auth.derive_token(theirs), greet=False)
    (welcome,) = untrusted.send(untrusted.hello())
    assert welcome.proof != untrusted.proof(welcome, auth.PRODUCER), (
        "the producer must not prove a token that it does not have"
    )
    for proof in (untrusted.proof(welcome), welcome.proof, b""):
        untrusted.send(untrusted.hello())
        (refused,) = untrusted.send(
            side_channel.Describe(proof, untrusted.layout, untrusted.memory())
        )
        assert "token" in refused.reason
        assert all(
            not key or key.hex() not in refused.reason
            for key in map(auth.derive_token, (ours, theirs))
        )
    assert not [name for name in producer.agent._peers if name.startswith("D")], (
        "the producer used the description"
    )


def test_a_proof_of_an_earlier_handshake_is_refused(make: Callable[..., Any]) -> None:
    producer = make(Producer, service_key=RIGHT)
    consumer = make(Consumer, producer, token=auth.derive_token(RIGHT), greet=False)
    (first,) = consumer.send(consumer.hello())
    consumer.send(consumer.hello())
    (refused,) = consumer.send(side_channel.Describe(consumer.proof(first), consumer.layout, None))
    assert "token" in refused.reason


@pytest.mark.parametrize(
    "theirs",
    [
        layout(block_size=4),
        layout(dtype="float16"),
        layout(num_blocks=0),
        layout(first=-1),
        layout(first=2),
        layout(count=0),
    ],
    ids=[
        "block size",
        "dtype",
        "no blocks",
        "heads before the first",
        "heads after the last",
        "no heads",
    ],
)
def test_incompatible_layouts_are_refused(
    make: Callable[..., Any], producer: Producer, theirs: Any
) -> None:
    consumer = make(Consumer, producer, greet=False)
    (welcome,) = consumer.send(consumer.hello())
    (refused,) = consumer.send(side_channel.Describe(consumer.proof(welcome), theirs, None))
    assert isinstance(refused, Refused)


def test_transfers_can_be_requested_only_after_the_handshake(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, greet=False)
    producer.offer()
    for _ in range(2):
        (refused,) = consumer.subscribe()
        assert "must come first" in refused.reason
        (refused,) = consumer.send(side_channel.Describe(b"", consumer.layout, None))
        assert "HELLO must come first" in refused.reason
        consumer.send(consumer.hello())  # only the first half of the handshake


def test_a_consumer_may_pause_between_hello_and_describe(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, greet=False)
    (welcome,) = consumer.send(consumer.hello())
    producer.advance(side_channel.HANDSHAKE_TIMEOUT_S)
    description = side_channel.Describe(consumer.proof(welcome), consumer.layout, None)
    (described,) = consumer.send(description)
    assert isinstance(described, side_channel.Description)


def test_an_abandoned_handshake_is_dropped(make: Callable[..., Any], producer: Producer) -> None:
    consumer = make(Consumer, producer, greet=False)
    consumer.send(consumer.hello())
    assert num_sessions(producer) == 1
    producer.advance(2 * side_channel.HANDSHAKE_TIMEOUT_S + LEASE_S)
    assert num_sessions(producer) == 0


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x00" * 1000, msgspec.msgpack.encode(["Subscribe", "t"]), b"\x91" * 2000],
)
def test_malformed_messages_disconnect_only_their_sender(
    make: Callable[..., Any], producer: Producer, consumer: Consumer, frame: bytes
) -> None:
    producer.offer()
    other = make(Consumer, producer, rank=1)
    (refused,) = other.send(frame)
    assert "malformed" in refused.reason
    assert consumer.subscribe() == []
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]


def test_thousands_of_handshakes_evict_no_active_consumer(
    make: Callable[..., Any],
    producer: Producer,
    consumer: Consumer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(sessions, "MAX_OPEN", 8)
    producer.offer()
    for number in range(30):
        make(Consumer, producer, instance_id=f"greeting-{number}", greet=False).send(
            consumer.hello()
        )
    assert num_sessions(producer) == 9
    assert consumer.subscribe() == []
    for number in range(30):
        make(Consumer, producer, instance_id=f"idle-{number}")
        consumer.heartbeat()
    assert num_sessions(producer) <= 16
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]


def test_a_consumer_with_a_lost_connection_is_dropped(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, push=True)
    assert "D/0" in producer.agent._peers
    consumer.close()

    def forgotten() -> bool:
        producer.advance(LEASE_S)
        return num_sessions(producer) == 0

    eventually(forgotten, "end of the session")
    assert "D/0" not in producer.agent._peers


# Subscriptions


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
    monkeypatch.setattr(early_messages, "MAX_EARLY", 3)
    for number in range(3):
        assert consumer.subscribe(f"t{number}") == []
    (cancelled,) = consumer.subscribe("t3")
    assert "retry later" in cancelled.reason
    producer.offer("t0")
    assert consumer.subscribe("t3") == []
    producer.advance(2 * LEASE_S)
    assert len(producer.side.transfers._early) == 0


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


def test_a_release_before_the_offer_ends_the_transfer_at_the_offer(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.subscribe(generation=7)
    consumer.release(generation=6)
    consumer.release(generation=7)
    producer.offer()
    assert producer.finished == ["t"]


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


# Leases


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
    producer.side.advance(producer.now)  # time for messages in the network to arrive
    assert producer.finished == []
    consumer.heartbeat()
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(2)
    assert producer.finished == ["t"]


# The producer's own scheduler


def test_a_cancelled_transfer_ends_with_the_consumers_acknowledgement(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3])
    producer.side.transfers.cancel("t")
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
    producer.side.transfers.cancel("t")
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
    producer.side.transfers.end_all("a defect")
    assert sorted(producer.finished) == ["a", "b"]


def test_each_handshake_has_its_own_nonce(producer: Producer, make: Callable[..., Any]) -> None:
    """A proof of one handshake must not be valid in another."""
    consumer = make(Consumer, producer, greet=False)
    first, second = consumer.send(consumer.hello(), consumer.hello())
    assert isinstance(first, Welcome)
    assert first.nonce != second.nonce
