"""A rank's link: statuses to the coordinator, StartWaves to peers, and invalid messages."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from baton_engine.elastic.rank.rank_link import RankLink, unreachable
from baton_protocol.topology import (
    Activity,
    Directive,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)
from support.waiting import eventually

HOST = "127.0.0.1"
DEADLINE_S = 60.0
START = StartWave(3, "nonce-3", 7)


def member(name: str, link_port: int) -> TopologyMember:
    return TopologyMember(name, f"instance-{name}", HOST, 1, link_port, 2)


class Coordinator:
    """A ROUTER that receives statuses."""

    def __init__(self, port: int = 0) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        eventually(
            lambda: self._bind(port), timeout_s=DEADLINE_S, what=f"port {port}", every_s=0.05
        )
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.route = b""

    def _bind(self, port: int) -> bool:
        try:
            self.socket.bind(f"tcp://{HOST}:{port}")
        except zmq.ZMQError as error:  # a thread of ZMQ closes the earlier socket later
            raise AssertionError(str(error)) from error
        return True

    def receive(self) -> Status:
        assert self.socket.poll(DEADLINE_S * 1000), "no status"
        self.route, payload = self.socket.recv_multipart()
        return msgspec.msgpack.decode(payload, type=Status)

    def receive_until(self, condition: Callable[[Status], bool]) -> Status:
        for _ in range(1000):
            if condition(status := self.receive()):
                return status
        raise AssertionError("no such status arrived")

    def send(self, payload: bytes) -> None:
        self.socket.send_multipart([self.route, payload])


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.socket.close()


Start = Callable[..., tuple[RankLink, "queue.SimpleQueue[Directive | StartWave]"]]


@pytest.fixture
def link(coordinator: Coordinator) -> Iterator[Start]:
    links: list[RankLink] = []

    def make(
        interval_s: float = 0.05, **hooks: Callable[[Status], Status]
    ) -> tuple[RankLink, queue.SimpleQueue[Directive | StartWave]]:
        received: queue.SimpleQueue[Directive | StartWave] = queue.SimpleQueue()
        links.append(
            RankLink(
                HOST,
                f"{HOST}:{coordinator.port}",
                deliver=received.put,
                wakeup_interval_s=interval_s,
                **hooks,
            )
        )
        links[-1].start()
        return links[-1], received

    yield make
    for each in links:
        each.close()


def test_a_status_is_amended_when_it_is_sent(link: Start, coordinator: Coordinator) -> None:
    """This also holds while the loop is stalled and publishes nothing."""
    now = {"step": 1, "activity": Activity.RUNS}
    own, _ = link(amend=lambda status: msgspec.structs.replace(status, **now))
    own.publish(Status(member("a", own.port), RankPhase.SERVING))
    assert coordinator.receive_until(lambda status: status.step == 1).activity is Activity.RUNS
    now.update(step=2, activity=Activity.WAITS)
    assert coordinator.receive_until(lambda status: status.step == 2).activity is Activity.WAITS


def test_the_latest_status_is_repeated_and_directives_are_delivered(link, coordinator) -> None:
    rank, received = link()
    rank.publish(Status(member("a", rank.port), RankPhase.LOADING))
    for _ in range(3):
        assert coordinator.receive().phase is RankPhase.LOADING
    rank.publish(Status(member("a", rank.port), RankPhase.STANDBY, num_running=3))
    assert (
        coordinator.receive_until(lambda status: status.phase is RankPhase.STANDBY).num_running == 3
    )
    directive = Directive(dismissed=True)
    coordinator.send(msgspec.msgpack.encode(directive))
    assert received.get(timeout=DEADLINE_S) == directive


def test_changes_are_sent_at_once_and_numbers_at_the_next_interval(link, coordinator) -> None:
    rank, _ = link(interval_s=30.0)
    status = Status(member("a", rank.port), RankPhase.STANDBY)
    for attempt in range(200):  # statuses sent before the connection exists are lost
        status = msgspec.structs.replace(status, prepared=f"attempt {attempt}")
        rank.publish(status)
        if coordinator.socket.poll(50):
            break
    coordinator.receive_until(lambda received: received == status)
    status = msgspec.structs.replace(status, num_running=99)
    rank.publish(status)
    assert not coordinator.socket.poll(200), "a changed number was sent at once"
    rank.publish(msgspec.structs.replace(status, leaving=True))
    assert coordinator.receive_until(lambda received: received.leaving).num_running == 99


def test_a_restarted_coordinator_receives_statuses_again(link, coordinator) -> None:
    rank, received = link()
    rank.publish(Status(member("a", rank.port), RankPhase.STANDBY))
    coordinator.receive()
    coordinator.socket.close()
    again = Coordinator(coordinator.port)
    try:
        assert again.receive().phase is RankPhase.STANDBY
        again.send(msgspec.msgpack.encode(Directive(dismissed=True)))
        assert received.get(timeout=DEADLINE_S) == Directive(dismissed=True)
    finally:
        again.socket.close()


def test_a_start_wave_is_repeated_to_all_peers_until_it_has_begun(link) -> None:
    rank, _ = link()
    others = [link() for _ in range(2)]
    rank.set_peers([member(str(index), other.port) for index, (other, _) in enumerate(others)])
    rank.start_wave(START)
    for _, received in others:
        for _ in range(3):
            assert received.get(timeout=DEADLINE_S) == START
    rank.end_start()
    rank.start_wave(StartWave(3, "nonce-3", 8))
    for _, received in others:
        while received.get(timeout=DEADLINE_S).wave == 7:
            pass
    rank.set_peers([member("1", others[1][0].port)])
    rank.start_wave(StartWave(4, "nonce-4", 0))
    assert_next(others[1][1], 4)
    rank.end_start()
    while not others[0][1].empty():
        assert others[0][1].get().generation == 3, "a start_wave arrived at a former peer"


def assert_next(received: queue.SimpleQueue[StartWave], generation: int) -> None:
    while received.get(timeout=DEADLINE_S).generation != generation:
        pass


def test_invalid_messages_of_the_coordinator_and_of_peers_are_dropped(link, coordinator) -> None:
    rank, received = link()
    rank.publish(Status(member("a", rank.port), RankPhase.STANDBY))
    coordinator.receive()
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"tcp://{HOST}:{rank.port}")
    try:
        for junk in (b"", b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode([1])):
            coordinator.send(junk)
            peer.send(junk)
        late = msgspec.msgpack.encode(StartWave(3, "nonce-3", 8))
        peer.send_multipart([b"a", b"b", late])
        peer.send(msgspec.msgpack.encode(START))
        assert received.get(timeout=DEADLINE_S) == START
        coordinator.send(msgspec.msgpack.encode(Directive(dismissed=True)))
        assert received.get(timeout=DEADLINE_S) == Directive(dismissed=True)
    finally:
        peer.close()


def test_a_closed_link_is_unreachable(link) -> None:
    rank, _ = link()
    gone, _ = link()
    members = [member("here", rank.port), member("gone", gone.port)]
    assert unreachable(members) == ()
    gone.close()
    # A thread of ZMQ closes its sockets later.
    eventually(
        lambda: unreachable(members) == ("instance-gone",),
        timeout_s=DEADLINE_S,
        what="the closed link to be unreachable",
    )


def test_an_invalid_address_is_an_error_at_once() -> None:
    with pytest.raises(zmq.ZMQError):
        RankLink(HOST, "not an address", deliver=lambda message: None)
