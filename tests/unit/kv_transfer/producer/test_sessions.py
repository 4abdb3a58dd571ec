"""Handshakes of consumers with a producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.transport_agent import MAX_REGIONS
from baton_kv_transfer.producer import sessions
from baton_kv_transfer.side_channel import Refused, Welcome
from baton_protocol.service_key import ServiceKey
from support.kv_transfer.producer_rig import LEASE_S, Consumer, Producer, indices, layout
from support.waiting import eventually


def num_sessions(producer: Producer) -> int:
    sessions = producer.side._sessions
    return len(sessions._pending) + len(sessions._open)


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
    consumer = make(Consumer, producer, handshake=False)
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
    untrusted = make(Consumer, producer, token=auth.derive_token(theirs), handshake=False)
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
    consumer = make(Consumer, producer, token=auth.derive_token(RIGHT), handshake=False)
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
    consumer = make(Consumer, producer, handshake=False)
    (welcome,) = consumer.send(consumer.hello())
    (refused,) = consumer.send(side_channel.Describe(consumer.proof(welcome), theirs, None))
    assert isinstance(refused, Refused)


def test_transfers_can_be_requested_only_after_the_handshake(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer, handshake=False)
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
    consumer = make(Consumer, producer, handshake=False)
    (welcome,) = consumer.send(consumer.hello())
    producer.advance(side_channel.HANDSHAKE_TIMEOUT_S)
    description = side_channel.Describe(consumer.proof(welcome), consumer.layout, None)
    (described,) = consumer.send(description)
    assert isinstance(described, side_channel.Description)


def test_an_abandoned_handshake_is_dropped(make: Callable[..., Any], producer: Producer) -> None:
    consumer = make(Consumer, producer, handshake=False)
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
        make(Consumer, producer, instance_id=f"handshake-{number}", handshake=False).send(
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


def test_each_handshake_has_its_own_nonce(producer: Producer, make: Callable[..., Any]) -> None:
    """A proof of one handshake must not be valid in another."""
    consumer = make(Consumer, producer, handshake=False)
    first, second = consumer.send(consumer.hello(), consumer.hello())
    assert isinstance(first, Welcome)
    assert first.nonce != second.nonce


def test_a_message_of_several_frames_is_refused(
    make: Callable[..., Any], producer: Producer
) -> None:
    consumer = make(Consumer, producer)
    whole = side_channel.encode(side_channel.Heartbeat(["t"]))
    consumer.socket.send_multipart([whole[:2], whole[2:]])
    producer.advance()
    (refused,) = consumer.received()
    assert isinstance(refused, Refused)
    assert "1 frame" in refused.reason
    assert producer.stats.handshakes_refused == 1


@pytest.mark.parametrize("num_regions", [MAX_REGIONS, MAX_REGIONS + 1])
def test_the_number_of_regions_of_a_consumer_is_limited(
    make: Callable[..., Any], producer: Producer, num_regions: int
) -> None:
    consumer = make(Consumer, producer, handshake=False)
    own = (consumer.bytes.ctypes.data, consumer.bytes.nbytes, 0, "kv")
    consumer.agent.register_memory([own] * (num_regions - 1))
    (welcome,) = consumer.send(consumer.hello())
    describe = side_channel.Describe(consumer.proof(welcome), consumer.layout, consumer.memory())
    (answer,) = consumer.send(describe)
    assert isinstance(answer, Refused) == (num_regions > MAX_REGIONS), answer
