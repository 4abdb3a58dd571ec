"""How a consumer validates a producer: the handshake and messages about transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import FailureReason, LoadResult
from baton_kv_transfer.consumer.load_manager import SETTLE_TIMEOUT_S
from baton_kv_transfer.memory.layout import HeadRange, RankAddress
from baton_kv_transfer.side_channel import (
    ALL_GENERATIONS,
    Cancelled,
    Pending,
    Released,
    Subscribe,
)
from baton_kv_transfer.transports.transfer import TransportError
from baton_protocol.service_key import ServiceKey
from support.kv_transfer.consumer_rig import (
    HOST,
    WHOLE,
    Rig,
    Worker,
    chain_hash,
    failures,
    layout_of,
)

NO_ADDRESS = "not an address"

# The handshake


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ({"version": 1}, ["1", "2"]),
        ({"compatibility_hash": "other"}, ["other", "c"]),
        ({"instance_id": "Q"}, ["Q", "P"]),
        ({"proof": b"no"}, ["token"]),
        ({"nonce": b"replayed"}, ["token"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_nothing_is_sent_to_a_producer_without_a_valid_proof(
    pushed: Rig, worker: Worker, lie: dict[str, Any], named: list[str]
) -> None:
    pushed.begin("t", worker, [1])
    pushed.deliver(worker, worker.welcome(worker.receive(side_channel.Hello), **lie))
    assert all(name in pushed.results["t"].error for name in named)
    assert failures(pushed) == {FailureReason.REFUSED: 1}
    assert pushed.stats.handshakes_refused == 1
    assert not worker.poll()


def test_a_producer_with_another_token_is_refused(pushed: Rig, worker: Worker) -> None:
    worker.token = b"another"
    pushed.begin("t", worker, [1])
    pushed.deliver(worker, worker.welcome(worker.receive(side_channel.Hello)))
    error = pushed.results["t"].error
    assert "service_key_file" in error
    assert "another token" in error


@pytest.mark.parametrize(
    "theirs", [None, ServiceKey(b"the key of another service")], ids=["none", "another"]
)
def test_a_producer_without_the_service_key_receives_not_even_hello(
    make: Callable[..., Any], pushed: Rig, theirs: ServiceKey | None
) -> None:
    worker = make(Worker, service_key=theirs)
    pushed.begin("t", worker, [1])
    pushed.receive()
    assert "service key" in pushed.results["t"].error
    assert not worker.poll()


def test_memory_is_described_only_for_pushed_loads(rig: Rig, pushed: Rig, worker: Worker) -> None:
    rig.subscribed("t", worker, [1])
    assert worker.described is None
    pushed.subscribed("t", worker, [1])
    assert worker.described.num_slots == WHOLE.num_blocks


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (
            "layout",
            layout_of(HeadRange(0, 4)).__class__(**{**WHOLE_FIELDS, "block_size": 4}),
            FailureReason.REFUSED,
        )
        for WHOLE_FIELDS in [msgspec.structs.asdict(WHOLE)]
    ]
    + [
        ("num_slots", 2**62, FailureReason.PROTOCOL),
        ("num_slots", 0, FailureReason.PROTOCOL),
        ("num_slots", -1, FailureReason.PROTOCOL),
        ("slot_nbytes", 8, FailureReason.PROTOCOL),
        ("base_address", 2**64 - 1, FailureReason.PROTOCOL),
        ("base_address", -(2**63), FailureReason.PROTOCOL),
        ("device_id", 2**64 - 1, FailureReason.PROTOCOL),
        ("mem_type", "PAPER", FailureReason.PROTOCOL),
        ("agent_metadata", b"garbage", FailureReason.PROTOCOL),
        ("lease_s", float("nan"), FailureReason.PROTOCOL),
        ("lease_s", float("inf"), FailureReason.PROTOCOL),
        ("lease_s", -1.0, FailureReason.PROTOCOL),
        ("lease_s", 0.0, FailureReason.PROTOCOL),
        ("ranks", [RankAddress(HOST, 1, HeadRange(0, 3))], FailureReason.PROTOCOL),
        ("ranks", [RankAddress(HOST, 1, HeadRange(0, 2**62))], FailureReason.PROTOCOL),
        (
            "ranks",
            [RankAddress(HOST, 1, HeadRange(0, 0)), RankAddress(HOST, 1, HeadRange(0, 4))],
            FailureReason.PROTOCOL,
        ),
        ("ranks", [RankAddress(HOST, 1, HeadRange(0, 2))] * 2, FailureReason.PROTOCOL),
        (
            "ranks",
            [RankAddress(HOST, 1, HeadRange(0, 2)), RankAddress(HOST, 1, HeadRange(2, 2))],
            FailureReason.PROTOCOL,
        ),
    ],
)
def test_an_invalid_description_fails_only_the_loads_of_its_producer(
    rig: Rig,
    worker: Worker,
    made: Callable[[Any], Any],
    field: str,
    value: Any,
    reason: FailureReason,
) -> None:
    rig.begin("t", worker, [1])
    rig.deliver(worker, worker.welcome(worker.receive(side_channel.Hello)))
    worker.receive(side_channel.Describe)
    rig.deliver(worker, worker.description(**{field: value}))
    assert rig.results["t"].num_valid_blocks == 0
    assert failures(rig) == {reason: 1}
    honest = made(Worker("Q"))
    subscribe = rig.subscribed("next", honest, [1])
    rig.deliver(honest, honest.published(subscribe, [0], last=True))
    assert rig.results["next"] == LoadResult(1)


def lose_at_connect(rig: Rig, worker: Worker) -> None:
    worker.hang_up()  # the connection is refused
    rig.begin("t", worker, [1])
    rig.receive()


def lose_without_an_address(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1], host=NO_ADDRESS)
    rig.advance()


def lose_a_worker_without_an_address(rig: Rig, worker: Worker) -> None:
    worker.ranks = [
        RankAddress(HOST, worker.port, HeadRange(0, 2)),
        RankAddress(NO_ADDRESS, worker.port, HeadRange(2, 2)),
    ]
    worker.layout = layout_of(HeadRange(0, 2))
    rig.begin("t", worker, [1])
    rig.handshake(worker)


def lose_after_hello(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1])
    worker.receive(side_channel.Hello)
    worker.hang_up()
    rig.receive()


def lose_after_welcome(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1])
    rig.deliver(worker, worker.welcome(worker.receive(side_channel.Hello)))
    worker.hang_up()
    rig.receive()


def lose_after_subscribe(rig: Rig, worker: Worker) -> None:
    rig.subscribed("t", worker, [1])
    worker.hang_up()
    rig.receive()


def lose_during_a_read(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    rig.agent.break_off(rig.agent.held[0])
    rig.advance()


def lose_from_the_agent(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    rig.agent.remove_remote_agent("P/0")
    rig.deliver(worker, worker.published(subscribe, [0], last=True))


def lose_while_another_load_settles(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("cancelled", worker, [2])
    rig.begin("t", worker, [1])
    rig.agent.hold = True
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    rig.consumer.cancel("cancelled")
    rig.advance(SETTLE_TIMEOUT_S)
    rig.advance()


def lose_to_a_successor(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1])
    worker.receive(side_channel.Hello)
    rig.deliver(worker, side_channel.Refused("instance id differs", succeeded=True))


def lose_by_a_refusal_after_the_handshake(rig: Rig, worker: Worker) -> None:
    rig.subscribed("t", worker, [1])
    rig.deliver(worker, side_channel.Refused("the producer cut all its peers off"))


@pytest.mark.parametrize(
    "lose",
    [
        lose_at_connect,
        lose_without_an_address,
        lose_a_worker_without_an_address,
        lose_after_hello,
        lose_after_welcome,
        lose_after_subscribe,
        lose_during_a_read,
        lose_from_the_agent,
        lose_while_another_load_settles,
        lose_to_a_successor,
        lose_by_a_refusal_after_the_handshake,
    ],
    ids=lambda lose: lose.__name__,
)
def test_a_lost_peer_is_never_reported_as_a_protocol_violation(
    rig: Rig, worker: Worker, lose: Callable[[Rig, Worker], None]
) -> None:
    lose(rig, worker)
    assert rig.results["t"].num_valid_blocks == 0
    assert failures(rig).get(FailureReason.PEER_LOST) == 1
    assert FailureReason.PROTOCOL not in failures(rig)


def test_a_peer_that_a_fence_removes_is_reported_as_lost(
    rig: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    """The fence is for a cancelled load from another peer, whose reads do not end."""
    other = made(Worker("Q"))
    rig.subscribed("t", worker, [1])
    rig.begin("cancelled", other, [2])
    rig.handshake(other)
    rig.agent.hold = rig.agent.ignores_removal = True
    rig.deliver(other, other.published(other.receive(Subscribe), [0], last=True))
    rig.consumer.cancel("cancelled")
    rig.advance(SETTLE_TIMEOUT_S)
    rig.deliver(worker, Pending(["t"]))
    assert not rig.results
    rig.advance(SETTLE_TIMEOUT_S)
    assert rig.agent.num_fences == 1
    assert "cut off" in rig.results["t"].error
    assert failures(rig) == {FailureReason.CANCELLED: 1, FailureReason.PEER_LOST: 1}


def test_a_producer_that_dies_after_its_description_is_lost_without_a_protocol_error(
    rig: Rig, worker: Worker, made: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some agents connect when a peer is added. NIXL then raises TransportError if it is gone."""

    def refuse_connection(metadata: bytes) -> str:
        raise TransportError("NIXL cannot connect to P/0")

    rig.begin("t", worker, [1])
    with monkeypatch.context() as patch:
        patch.setattr(rig.agent, "add_remote_agent", refuse_connection)
        rig.handshake(worker)
    assert rig.results["t"].num_valid_blocks == 0
    assert "NIXL cannot connect to P/0" in rig.results["t"].error
    assert failures(rig) == {FailureReason.PEER_LOST: 1}
    successor = made(Worker("Q"))
    subscribe = rig.subscribed("next", successor, [1])
    rig.deliver(successor, successor.published(subscribe, [0], last=True))
    assert rig.results["next"] == LoadResult(1)


def test_an_agent_of_another_instance_is_refused(
    rig: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    stranger = made(Worker("Q"))
    rig.begin("t", worker, [1])
    rig.deliver(worker, worker.welcome(worker.receive(side_channel.Hello)))
    worker.receive(side_channel.Describe)
    rig.deliver(worker, worker.description(agent_metadata=stranger.agent.get_agent_metadata()))
    assert "Q/0" in rig.results["t"].error
    assert failures(rig) == {FailureReason.PROTOCOL: 1}


def test_messages_in_the_wrong_order_lose_the_peer(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1])
    worker.receive(side_channel.Hello)
    rig.deliver(worker, worker.description())
    assert "out of turn" in rig.results["t"].error
    assert failures(rig) == {FailureReason.PROTOCOL: 1}


def test_a_silent_handshake_times_out(rig: Rig, worker: Worker) -> None:
    rig.begin("t", worker, [1])
    rig.advance(9.9)
    assert not rig.results
    deadline = rig.consumer.next_deadline()
    assert deadline is not None
    rig.clock.now = deadline
    rig.advance()
    assert failures(rig) == {FailureReason.TIMEOUT: 1}


def test_another_instance_at_the_same_address_is_another_peer(
    rig: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2])
    rig.deliver(worker, worker.published(subscribe, [0]))
    worker.close()
    rig.receive()
    assert rig.results["t"].num_valid_blocks == 1
    successor = made(Worker("P2", port=worker.port))
    rig.begin("for-the-old-one", worker, [1])
    rig.deliver(successor, successor.welcome(successor.receive(side_channel.Hello)))
    assert "instance id" in rig.results["for-the-old-one"].error
    subscribe = rig.subscribed("next", successor, [1])
    rig.deliver(successor, successor.published(subscribe, [0], last=True))
    assert rig.results["next"] == LoadResult(1)


@pytest.mark.parametrize(
    ("succeeded", "reason"), [(True, FailureReason.PEER_LOST), (False, FailureReason.REFUSED)]
)
def test_a_peer_that_restarted_is_lost_and_one_that_does_not_fit_refuses(
    rig: Rig, worker: Worker, succeeded: bool, reason: FailureReason
) -> None:
    rig.begin("t", worker, [1])
    worker.receive(side_channel.Hello)
    rig.deliver(worker, side_channel.Refused("differs", succeeded))
    assert "differs" in rig.results["t"].error
    assert failures(rig) == {reason: 1}


# Messages about a transfer


def test_messages_of_an_earlier_load_are_ignored(rig: Rig, worker: Worker) -> None:
    first = rig.subscribed("t", worker, [1])
    old = worker.published(first, [0], last=True)
    rig.consumer.cancel("t")
    rig.advance()
    assert rig.results.pop("t").error == "cancelled"
    second = rig.subscribed("t", worker, [2])
    assert second.generation != first.generation
    rig.deliver(worker, old)
    rig.deliver(worker, Cancelled("t", first.generation, "late"))
    rig.deliver(worker, Released("t", first.generation))
    assert not rig.results
    assert rig.stats.blocks_received == 0
    relabelled = msgspec.structs.replace(old, generation=second.generation)
    rig.deliver(worker, relabelled)
    assert rig.results["t"].num_valid_blocks == 0, "its checksum is bound to the earlier load"
    assert failures(rig)[FailureReason.CHECKSUM] == 1


def test_messages_of_a_peer_without_a_part_in_the_load_are_ignored(
    rig: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    other = made(Worker("Q"))
    subscribe = rig.subscribed("t", worker, [1])
    rig.begin("u", other, [2])
    rig.handshake(other)
    rig.deliver(other, other.published(subscribe, [0], last=True))
    rig.deliver(other, Cancelled("t", ALL_GENERATIONS, "not yours"))
    assert not rig.results
    rig.deliver(worker, Cancelled("t", ALL_GENERATIONS, "all loads of it"))
    assert rig.results["t"].error == "all loads of it"


def test_a_repeated_publication_is_ignored(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2])
    rig.agent.hold = True
    publish = worker.published(subscribe, [0])
    for _ in range(3):
        rig.deliver(worker, publish)
    assert len(rig.agent.held) == 1
    rig.agent.land(rig.agent.held[0])
    rig.deliver(worker, publish)
    assert not rig.agent.held
    assert rig.stats.blocks_received == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"index": -1},
        {"slot": -1},
        {"slot": WHOLE.num_blocks},
        {"slot": 2**63},
    ],
    ids=str,
)
def test_an_invalid_publication_fails_the_load(
    rig: Rig, worker: Worker, lie: dict[str, Any]
) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    publish = worker.published(subscribe, [0], last=True)
    publish.blocks[0] = msgspec.structs.replace(publish.blocks[0], **lie)
    rig.deliver(worker, publish)
    assert failures(rig) == {FailureReason.PROTOCOL: 1}
    assert rig.results["t"].num_valid_blocks == 0


@pytest.mark.parametrize("checksum", [-1, 0, 2**64 - 1])
def test_a_checksum_of_the_wrong_type_fails_the_load(
    rig: Rig, worker: Worker, checksum: int
) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    publish = worker.published(subscribe, [0], last=True)
    publish.blocks[0].checksum = checksum
    rig.deliver(worker, publish)
    assert failures(rig) == {FailureReason.CHECKSUM: 1}


def test_huge_block_indices_are_ignored(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    publish = worker.published(subscribe, [0], last=True)
    publish.blocks.append(msgspec.structs.replace(publish.blocks[0], index=2**63))
    rig.deliver(worker, publish)
    assert rig.results == {"t": LoadResult(1)}


def test_a_shorter_prompt_is_reported_as_another_prompt(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1, 2])
    rig.deliver(worker, worker.published(subscribe, [0], last=True))
    assert "1 of the 2 requested blocks" in rig.results["t"].error
    assert failures(rig) == {FailureReason.OTHER_PROMPT: 1}


def test_other_tokens_are_reported_as_another_prompt(rig: Rig, worker: Worker) -> None:
    subscribe = rig.subscribed("t", worker, [1])
    publish = worker.published(subscribe, [0], last=True)
    publish.blocks[0] = msgspec.structs.replace(
        publish.blocks[0], chain_hash=chain_hash("other", 0)
    )
    rig.deliver(worker, publish)
    assert rig.results["t"].num_valid_blocks == 0
    assert "other tokens" in rig.results["t"].error
    assert failures(rig) == {FailureReason.OTHER_PROMPT: 1}


def test_a_malformed_message_loses_the_peer(rig: Rig, worker: Worker) -> None:
    rig.subscribed("t", worker, [1])
    worker.router.send_multipart([worker.identity, b"\xff\xff"])
    rig.receive()
    assert failures(rig) == {FailureReason.PROTOCOL: 1}
