"""The producer's half against consumers that say anything at any time: what it hands out, to whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.producer import early_messages, sessions, transfer_manager
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
def test_a_hello_that_does_not_fit_is_refused_naming_both_values(
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
def test_memory_is_described_only_after_the_tokens_proof(
    make: Callable[..., Any], ours: ServiceKey | None, theirs: ServiceKey | None
) -> None:
    producer = make(Producer, service_key=ours)
    friend = make(Consumer, producer, token=auth.derive_token(ours))
    assert friend.description is not None
    stranger = make(Consumer, producer, token=auth.derive_token(theirs), greet=False)
    (welcome,) = stranger.send(stranger.hello())
    assert welcome.proof != stranger.proof(welcome, auth.PRODUCER), (
        "the consumer sees that the producer is none of its service"
    )
    for proof in (stranger.proof(welcome), welcome.proof, b""):
        stranger.send(stranger.hello())
        (refused,) = stranger.send(side_channel.Describe(proof, stranger.layout, stranger.memory()))
        assert "token" in refused.reason
        assert all(
            not key or key.hex() not in refused.reason
            for key in map(auth.derive_token, (ours, theirs))
        )
    assert not [name for name in producer.agent._peers if name.startswith("D")], (
        "nor is its memory looked at"
    )


def test_a_proof_of_an_earlier_handshake_does_not_hold(make: Callable[..., Any]) -> None:
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
def test_layouts_that_do_not_fit_are_refused(
    make: Callable[..., Any], producer: Producer, theirs: Any
) -> None:
    consumer = make(Consumer, producer, greet=False)
    (welcome,) = consumer.send(consumer.hello())
    (refused,) = consumer.send(side_channel.Describe(consumer.proof(welcome), theirs, None))
    assert isinstance(refused, Refused)


def test_transfers_may_be_asked_for_only_after_the_handshake(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, greet=False)
    producer.offer()
    for _ in range(2):
        (refused,) = consumer.subscribe()
        assert "must come first" in refused.reason
        (refused,) = consumer.send(side_channel.Describe(b"", consumer.layout, None))
        assert "HELLO must come first" in refused.reason
        consumer.send(consumer.hello())  # which is the first half only


def test_a_consumer_that_stood_still_between_hello_and_describe_is_not_refused(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, greet=False)
    (welcome,) = consumer.send(consumer.hello())
    producer.advance(side_channel.HANDSHAKE_TIMEOUT_S)
    description = side_channel.Describe(consumer.proof(welcome), consumer.layout, None)
    (described,) = consumer.send(description)
    assert isinstance(described, side_channel.Description)


def test_a_handshake_that_both_sides_gave_up_is_forgotten(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, greet=False)
    consumer.send(consumer.hello())
    assert num_sessions(producer) == 1
    producer.advance(2 * side_channel.HANDSHAKE_TIMEOUT_S + LEASE_S)
    assert num_sessions(producer) == 0


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x00" * 1000, msgspec.msgpack.encode(["Subscribe", "t"]), b"\x91" * 2000],
)
def test_malformed_messages_are_refused_and_cost_only_their_sender(
    make: Callable[..., Any], producer: Producer, consumer: Consumer, frame: bytes
) -> None:
    producer.offer()
    other = make(Consumer, producer, rank=1)
    (refused,) = other.send(frame)
    assert "malformed" in refused.reason
    assert consumer.subscribe() == []
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]


def test_thousands_of_handshakes_evict_no_consumer_at_work(
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


def test_a_consumer_whose_connection_is_gone_is_found_out_and_forgotten(
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


def test_blocks_are_published_to_the_subscriber_with_proofs_of_its_load(
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


def test_who_comes_late_gets_everything_at_once_and_sums_are_computed_once_in_one_call(
    make: Callable[..., Any], producer: Producer
) -> None:
    producer.offer()
    producer.save([3, 4])
    producer.save([5], first=2, last=True)
    assert producer.memory.sum_calls == [], "nobody asked for any heads yet"
    left, right = (
        make(Consumer, producer, rank=rank, heads=HeadRange(2 * rank, 2)) for rank in (0, 1)
    )
    (publish,) = left.subscribe(worker=0, of=2)
    assert (indices([publish]), publish.last) == ([0, 1, 2], True)
    assert producer.memory.sum_calls == [(3, HeadRange(0, 2))]
    right.subscribe(worker=1, of=2)
    assert producer.memory.sum_calls == [(3, HeadRange(0, 2)), (3, HeadRange(2, 2))]


def test_many_blocks_are_published_in_parts_and_the_last_part_says_so(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_manager, "PART_BYTES", 2 * layout().block_nbytes)
    producer.offer()
    consumer.subscribe()
    producer.save([3, 4, 5, 6, 7], last=True)
    heard = consumer.received()
    assert [[block.index for block in publish.blocks] for publish in heard] == [[0, 1], [2, 3], [4]]
    assert [publish.last for publish in heard] == [False, False, True]


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
    assert producer.finished == [], "the other one has not even come"
    right.subscribe(worker=1, of=2, generation=8)
    right.release(worker=1, of=2, generation=8)
    assert producer.finished == ["t"]


def test_a_load_that_wants_nothing_releases_without_subscribing(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.release("early")
    producer.offer("early")
    assert producer.finished == ["early"]
    producer.offer("late")
    consumer.release("late")
    assert producer.finished == ["early", "late"]


def test_a_subscription_before_the_offer_waits_for_it_and_one_after_the_end_is_refused(
    producer: Producer, consumer: Consumer
) -> None:
    assert consumer.subscribe() == []
    producer.offer()
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]
    consumer.release()
    (cancelled,) = consumer.subscribe(generation=8)
    assert cancelled == Cancelled("t", 8, "transfer t has ended: released")


def test_a_subscription_that_was_never_offered_is_refused_after_a_lease(
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


def test_early_subscriptions_have_a_limit(
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
def test_what_cannot_be_asked_for_is_refused(
    producer: Producer, consumer: Consumer, lie: dict[str, Any]
) -> None:
    producer.offer()
    (cancelled, *_) = consumer.subscribe(**lie)
    assert isinstance(cancelled, Cancelled)
    assert producer.finished == []
    assert consumer.subscribe() == [], "the transfer is still there for who asks rightly"


def test_heads_that_the_two_workers_do_not_share_count_as_refused_descriptors(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    (cancelled,) = consumer.subscribe(heads=HeadRange(0, 4))
    assert "[0, 4)" in cancelled.reason
    assert "[0, 2)" in cancelled.reason
    assert producer.stats.descriptors_refused == 1


def test_a_second_worker_of_the_same_number_is_refused_and_the_first_stands(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(generation=7)
    second = make(Consumer, producer)
    (cancelled,) = second.subscribe(generation=8)
    assert "exists already" in cancelled.reason
    assert cancelled.generation == 8
    assert consumer.subscribe(generation=7) == [], "said twice is said once"
    producer.save([3], last=True)
    assert indices(consumer.received()) == [0]
    assert second.received() == []
    second.release(generation=8)
    second.release(generation=7)
    assert producer.finished == []
    consumer.release(generation=7)
    assert producer.finished == ["t"]


def test_a_worker_with_another_number_of_workers_is_refused_naming_both(
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


def test_a_release_of_another_generation_counts_for_nothing(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe(generation=7)
    producer.save([3], last=True)
    for generation in (6, 8, 0, -7, 2**64 - 1):
        consumer.release(generation=generation)
    assert producer.finished == []
    consumer.release(generation=7)
    consumer.release(generation=7)
    assert producer.finished == ["t"]


def test_a_released_load_does_not_come_back(make: Callable[..., Any], producer: Producer) -> None:
    left = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    left.release(worker=0, of=2)
    (cancelled,) = left.subscribe(worker=0, of=2)
    assert "released" in cancelled.reason
    assert producer.finished == []


def test_a_release_before_the_offer_ends_the_transfer_when_it_comes(
    producer: Producer, consumer: Consumer
) -> None:
    consumer.subscribe(generation=7)
    consumer.release(generation=6)
    consumer.release(generation=7)
    producer.offer()
    assert producer.finished == ["t"]


def test_strangers_neither_get_nor_end_a_transfer(
    make: Callable[..., Any], producer: Producer, consumer: Consumer
) -> None:
    stranger = make(Consumer, producer, instance_id="E")
    producer.offer()
    (cancelled,) = stranger.subscribe()
    assert "offered to instance D, not to E" in cancelled.reason
    stranger.release()
    assert producer.finished == []
    assert consumer.subscribe() == []


# Leases


def test_a_consumer_that_never_comes_costs_one_lease_after_the_last_save(
    producer: Producer,
) -> None:
    producer.offer()
    producer.advance(5 * LEASE_S)
    assert producer.finished == [], "it waits for its turn, no block is kept"
    producer.save([3])
    producer.advance(LEASE_S - 1)
    producer.save([4], first=1, last=True)
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(1)
    assert producer.finished == ["t"]
    assert producer.stats.leases_expired == 1


def test_a_subscriber_that_never_heartbeats_costs_one_lease(
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


def test_heartbeats_keep_blocks_and_are_answered_while_more_is_to_come(
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


def test_heartbeats_keep_nothing_for_ever(producer: Producer, consumer: Consumer) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3], last=True)
    for _ in range(100):
        producer.advance(LEASE_S - 1)
        consumer.heartbeat()
    assert producer.finished == ["t"]


def test_a_worker_that_does_not_come_costs_one_lease_whatever_the_other_says(
    make: Callable[..., Any], producer: Producer
) -> None:
    left = make(Consumer, producer, heads=HeadRange(0, 2))
    producer.offer()
    left.subscribe(worker=0, of=2)
    producer.save([3], last=True)
    heard = [
        message for _ in range(3) for message in (producer.advance(LEASE_S / 2), *left.heartbeat())
    ]
    assert Cancelled("t", 7, "its lease expired") in heard
    assert producer.finished == []
    left.release(worker=0, of=2)
    assert producer.finished == ["t"]


def test_what_was_sent_while_the_thread_stood_still_is_read_before_a_lease_ends(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.save([3])
    producer.now += 3 * LEASE_S
    producer.side.advance(producer.now)  # whatever the network still holds gets a moment to arrive
    assert producer.finished == []
    consumer.heartbeat()
    producer.advance(LEASE_S - 1)
    assert producer.finished == []
    producer.advance(2)
    assert producer.finished == ["t"]


# The producer's own scheduler


def test_a_cancelled_transfer_ends_when_the_consumer_acknowledged_it(
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


def test_a_cancelled_transfer_that_nobody_acknowledges_ends_with_the_lease(
    producer: Producer, consumer: Consumer
) -> None:
    producer.offer()
    consumer.subscribe()
    producer.side.transfers.cancel("t")
    for _ in range(3):
        producer.advance(LEASE_S / 2)
        consumer.heartbeat()
    assert producer.finished == ["t"]


def test_two_offers_of_one_transfer_are_one(producer: Producer, consumer: Consumer) -> None:
    producer.offer()
    consumer.subscribe()
    producer.offer(peer="E")
    consumer.release()
    assert producer.finished == ["t"]
    producer.offer()
    consumer.release(generation=8)
    assert producer.finished == ["t", "t"], "an ended one may be offered again"


def test_publishing_waits_for_slots_and_the_transfer_that_holds_some_goes_first(
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


def test_small_transfers_do_not_overtake_a_large_one_that_waits_for_slots(
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


def test_a_transfer_for_which_no_slot_becomes_free_ends_with_a_reason(
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


def test_a_welcome_is_no_secret_kept(producer: Producer, make: Callable[..., Any]) -> None:
    """Two greetings get two nonces: what was proved once proves nothing later."""
    consumer = make(Consumer, producer, greet=False)
    first, second = consumer.send(consumer.hello(), consumer.hello())
    assert isinstance(first, Welcome)
    assert first.nonce != second.nonce
