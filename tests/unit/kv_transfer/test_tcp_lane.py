"""The lane over TCP: whom it believes, what it stores and sends, and what becomes of work when a side or the network goes away."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from agent_processes import NUM_BLOCKS, OwnerProcess, Side, emulate_network_access
from kv_processes import wait_for
from numpy.typing import NDArray

from baton_kv_transfer.agent import create_agent
from baton_kv_transfer.transports import tcp_clients
from baton_kv_transfer.transports.base import Region, TransportError, XferState
from baton_kv_transfer.transports.framed_socket import DATA
from baton_kv_transfer.transports.lane_protocol import (
    ANSWER,
    HELLO,
    NOTIF,
    READ,
    WRITE,
    TCPAddress,
    TCPHello,
    encode_request,
)
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.rows import FRAME_BYTES
from baton_kv_transfer.transports.tcp_lane import TCPLane
from baton_kv_transfer.transports.transfer import Transfer

WORDS = 2**20
HEADER = struct.Struct("<IIQ")
LENGTH = FRAME_BYTES // 8
"""Words of a frame."""


def rows(words: NDArray[np.int64], *runs: tuple[int, int]) -> NDArray[np.int64]:
    """[n, 3] of (first word, number of words)."""
    return np.array([[words.ctypes.data + first * 8, count * 8, 0] for first, count in runs], dtype=np.int64)


class LaneHere:
    """A lane in this process, with memory and what was notified to it."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self.notifs: list[tuple[str, bytes]] = []
        self.thread = LaneThread(f"lane-{name}")
        self.lane = TCPLane(
            self.thread, name, host, lambda sender, message: self.notifs.append((sender, message)), lambda: None
        )
        self.thread.start(self.lane.end)
        self.words = np.arange(WORDS, dtype=np.int64)
        self.region = Region(self.words.ctypes.data, self.words.nbytes)
        self.lane.register(self.region)

    @property
    def address(self) -> TCPAddress:
        return msgspec.msgpack.decode(self.lane.address(), type=TCPAddress)

    def post(
        self, op: str, peer: str, local: NDArray[np.int64], remote: NDArray[np.int64], notif: bytes = b""
    ) -> Transfer:
        transfer = Transfer(op, peer, local, remote, np.zeros(len(local), dtype=np.int64), notif)
        self.lane.begin(transfer)
        return transfer


def end(transfer: Transfer) -> tuple[XferState, str]:
    wait_for("end of the transfer", lambda: transfer.state is not XferState.PROC)
    return transfer.state, transfer.error


class Raw:
    """A connection of somebody who says what a test wants."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.end.settimeout(10)

    @classmethod
    def to(cls, lane: LaneHere, name: str = "raw") -> Raw:
        """One whose hello is accepted, if it has a name."""
        raw = cls(socket.create_connection((lane.address.host, lane.address.port)))
        if name:
            raw.send(HELLO, 0, msgspec.msgpack.encode(TCPHello(lane.address.secret, name)))
        return raw

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        self.end.sendall(HEADER.pack(len(payload), kind, number) + payload)

    def ask(self, kind: int, number: int, descs: NDArray[np.int64], notif: bytes = b"") -> None:
        self.send(kind, number, encode_request(notif, descs[:, :2]))

    def receive(self) -> tuple[int, int, bytes]:
        length, kind, number = HEADER.unpack(self._exactly(HEADER.size))
        return kind, number, self._exactly(length)

    def is_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self.end.recv(1) == b""
        return True

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            some = self.end.recv(count - len(received))
            assert some, "the connection ended"
            received += some
        return bytes(received)


@pytest.fixture
def lanes() -> Iterator[Callable[..., LaneHere]]:
    made: list[LaneHere] = []

    def make(name: str, host: str = "127.0.0.1") -> LaneHere:
        made.append(LaneHere(name, host))
        return made[-1]

    yield make
    for lane in made:
        lane.thread.close()


@pytest.fixture
def pair(lanes: Callable[..., LaneHere]) -> tuple[LaneHere, LaneHere]:
    """(one that knows the owner, the owner)."""
    one, owner = lanes("one"), lanes("owner")
    one.lane.add_peer("owner", owner.lane.address())
    return one, owner


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    side = Side("ucx", OwnerProcess("ucx", {"UCX_TLS": "tcp"}))
    yield side
    side.agent.close()
    side.owner.stop()


# -- bytes


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_rows_of_all_sizes_move_and_nothing_beside_them(pair: tuple[LaneHere, LaneHere], op: str) -> None:
    one, owner = pair
    one.words[:] = -1 - one.words
    runs = [(0, 300_001), (300_002, 1), *[(300_004 + 3 * i, 2) for i in range(20_000)], (400_000, 262_144)]
    local, remote = rows(one.words, *runs), rows(owner.words, *runs)
    source, target = (owner.words, one.words) if op == "READ" else (one.words, owner.words)
    expected = target.copy()
    for first, count in runs:
        expected[first : first + count] = source[first : first + count]
    assert end(one.post(op, "owner", local, remote, b"moved"))[0] is XferState.DONE
    np.testing.assert_array_equal(target, expected)
    wait_for("the notification", lambda: owner.notifs == [("one", b"moved")])


def test_transfers_of_a_peer_take_turns(lanes: Callable[..., LaneHere]) -> None:
    owner = lanes("owner")
    raw = Raw.to(owner)
    everything = [(0, WORDS)] * 4
    raw.ask(READ, 1, rows(owner.words, *everything))
    raw.ask(READ, 2, rows(owner.words, *everything))
    numbers = [raw.receive()[1] for _ in range(2 * 4 * WORDS // LENGTH)]
    assert sorted(numbers) == [1] * (4 * WORDS // LENGTH) + [2] * (4 * WORDS // LENGTH)
    begun = numbers.index(2)  # by then the first was ahead
    assert numbers[begun : begun + 8] == [2, 1] * 4
    raw.end.close()


def test_a_notification_does_not_wait_behind_a_long_transfer(pair: tuple[LaneHere, LaneHere]) -> None:
    one, owner = pair
    everything = [(0, WORDS)] * 64
    write = one.post("WRITE", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    one.lane.send_notif("owner", b"quick")
    wait_for("the notification", lambda: owner.notifs)
    assert write.state is XferState.PROC
    assert end(write)[0] is XferState.DONE


# -- who may


@pytest.mark.parametrize("hello", ["none", "wrong secret", "no name", "garbage", "nothing but bytes", "long", "data"])
def test_who_does_not_know_the_secret_is_hung_up_on(lanes: Callable[..., LaneHere], hello: str) -> None:
    owner = lanes("owner")
    raw = Raw.to(owner, "")
    if hello == "none":
        raw.ask(WRITE, 1, rows(owner.words, (0, 8)))
    elif hello == "nothing but bytes":
        raw.end.sendall(b"\xff" * 64)
    elif hello == "long":
        raw.send(HELLO, 0, b"x" * 5000)
    elif hello == "data":
        raw.send(DATA, 1, b"x")
    elif hello == "garbage":
        raw.send(HELLO, 0, b"\xc1")
    else:
        secret = b"0" * 16 if hello == "wrong secret" else owner.address.secret
        raw.send(HELLO, 0, msgspec.msgpack.encode(TCPHello(secret, "" if hello == "no name" else "raw")))
    assert raw.is_cut_off()
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    peer = lanes("peer")
    peer.lane.add_peer("owner", owner.lane.address())
    peer.lane.send_notif("owner", b"hello")
    wait_for("a word of a real peer", lambda: owner.notifs == [("peer", b"hello")])


def test_who_says_nothing_is_hung_up_on_and_many_of_them_keep_nobody_out(
    lanes: Callable[..., LaneHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = lanes("owner")
    monkeypatch.setattr(tcp_clients, "HELLO_TIMEOUT_S", 60.0)
    monkeypatch.setattr(tcp_clients, "MAX_STRANGERS", 3)
    strangers = [Raw.to(owner, "") for _ in range(5)]
    assert all(stranger.is_cut_off() for stranger in strangers[:2])
    Raw.to(owner).send(NOTIF, 1, b"me")
    wait_for("a word of one who knows the secret", lambda: owner.notifs == [("raw", b"me")])
    monkeypatch.setattr(tcp_clients, "HELLO_TIMEOUT_S", 0.05)
    assert Raw.to(owner, "").is_cut_off()


def test_a_peers_rows_are_checked_by_the_owner_as_a_whole(pair: tuple[LaneHere, LaneHere]) -> None:
    one, owner = pair
    one.words[:] = -1
    elsewhere = np.zeros(2 * LENGTH, dtype=np.int64)
    bad = np.concatenate((rows(owner.words, (0, 2 * LENGTH)), rows(elsewhere, (0, 2 * LENGTH))))
    local = rows(one.words, (0, 2 * LENGTH), (2 * LENGTH, 2 * LENGTH))
    for number, op in enumerate(("WRITE", "READ"), start=1):
        state, error = end(one.post(op, "owner", local, bad, b"n"))
        assert state is XferState.ERR
        assert "1 of 2 descriptors are outside the memory registered there" in error
        assert owner.lane.num_refused == number
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    assert not elsewhere.any()
    assert (one.words == -1).all()
    assert end(one.post("WRITE", "owner", local[:1], bad[:1], b"good"))[0] is XferState.DONE
    assert owner.notifs == [("one", b"good")]
    assert (owner.words[: 2 * LENGTH] == -1).all()


@pytest.mark.parametrize("request_", ["no rows", "half a row", "too much", "number in use", "unknown", "long"])
def test_requests_that_make_no_sense_end_their_connection(lanes: Callable[..., LaneHere], request_: str) -> None:
    owner = lanes("owner")
    raw = Raw.to(owner)
    some = rows(owner.words, (0, 8))
    if request_ == "no rows":
        raw.ask(READ, 1, some[:0])
    elif request_ == "half a row":
        raw.send(WRITE, 1, encode_request(b"", some[:, :2])[:-8])
    elif request_ == "too much":
        raw.ask(READ, 1, np.tile(rows(owner.words, (0, WORDS)), (2**18, 1)))
    elif request_ == "number in use":
        raw.ask(WRITE, 1, some)
        raw.ask(WRITE, 1, some)
    elif request_ == "unknown":
        raw.send(99, 1, b"?")
    else:
        raw.end.sendall(HEADER.pack(2**31, READ, 1))
    assert raw.is_cut_off()
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))


# -- what is not under way (any more)


def test_a_write_that_breaks_off_is_not_notified_and_its_connection_ends_alone(pair: tuple[LaneHere, LaneHere]) -> None:
    one, owner = pair
    raw = Raw.to(owner)
    raw.ask(WRITE, 1, rows(owner.words, (0, 2 * LENGTH)), b"all there")
    raw.end.sendall(HEADER.pack(FRAME_BYTES, DATA, 1) + b"\xff" * 1000)
    wait_for("the first bytes", lambda: (owner.words[:125] == -1).all())
    raw.end.close()
    assert end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (200, 8))))[0] is XferState.DONE
    np.testing.assert_array_equal(owner.words[125:], np.arange(125, WORDS))
    assert not owner.notifs


def test_memory_deregistered_while_it_is_written_gets_no_more_bytes(lanes: Callable[..., LaneHere]) -> None:
    owner = lanes("owner")
    raw = Raw.to(owner)
    raw.ask(WRITE, 1, rows(owner.words, (0, 2 * LENGTH)), b"all there")
    raw.end.sendall(HEADER.pack(FRAME_BYTES, DATA, 1) + b"\xff" * 1000)
    wait_for("the first bytes", lambda: (owner.words[:125] == -1).all())
    owner.lane.deregister(owner.region)
    raw.end.sendall(b"\xff" * (FRAME_BYTES - 1000))
    raw.send(DATA, 1, b"\xff" * FRAME_BYTES)
    assert raw.receive() == (ANSWER, 1, b"the memory was deregistered")
    raw.send(NOTIF, 2, b"after it")
    wait_for("a later message", lambda: owner.notifs == [("raw", b"after it")])
    np.testing.assert_array_equal(owner.words[125:], np.arange(125, WORDS))
    raw.end.close()


def test_memory_deregistered_while_it_is_read_is_not_read_on(lanes: Callable[..., LaneHere]) -> None:
    owner = lanes("owner")
    raw = Raw.to(owner)
    raw.ask(READ, 1, rows(owner.words, *[(0, WORDS)] * 16))
    assert raw.receive()[:2] == (DATA, 1)
    owner.lane.deregister(owner.region)
    owner.words[:] = -1
    while (frame := raw.receive())[0] == DATA:
        assert b"\xff" * 8 not in frame[2]
    assert frame == (ANSWER, 1, b"the memory was deregistered")
    raw.end.close()


def test_after_a_fence_nothing_of_before_is_stored_and_the_old_secret_leads_nowhere(
    pair: tuple[LaneHere, LaneHere],
) -> None:
    one, owner = pair
    everything = [(0, WORDS)] * 20
    before = owner.lane.address()
    one.words[:] = 7
    write = one.post("WRITE", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    wait_for("the first bytes", lambda: owner.words[0] == 7)
    owner.lane.fence()
    owner.words[:] = -5
    assert end(write)[0] is XferState.ERR
    read = one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (0, 8)))
    assert end(read)[0] is XferState.ERR
    assert (owner.words == -5).all()
    assert owner.lane.address() != before
    one.lane.add_peer("owner", owner.lane.address())
    assert end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (0, 8))))[0] is XferState.DONE
    assert (one.words[:8] == -5).all()


@pytest.mark.parametrize("answer", ["nothing", "too early", "too much", "another"])
def test_an_owner_that_answers_wrong_ends_the_transfer_in_err(lanes: Callable[..., LaneHere], answer: str) -> None:
    one = lanes("one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        one.lane.add_peer("liar", msgspec.msgpack.encode(TCPAddress(*server.getsockname(), b"s")))
        read = one.post("READ", "liar", rows(one.words, (0, 8)), rows(one.words, (0, 8)))
        raw = Raw(server.accept()[0])
        assert raw.receive()[0] == HELLO
        _, number, _ = raw.receive()
        if answer == "too early":
            raw.send(ANSWER, number)
        elif answer == "too much":
            raw.send(DATA, number, b"x" * 65)
        elif answer == "another":
            raw.send(DATA, number + 1, b"x" * 64)
            raw.send(ANSWER, number + 1)
        raw.end.close() if answer != "too early" else None
        assert end(read)[0] is XferState.ERR
    np.testing.assert_array_equal(one.words, np.arange(WORDS))


# -- connections


def test_a_peer_that_was_not_there_is_connected_to_by_the_next_use(lanes: Callable[..., LaneHere]) -> None:
    one = lanes("one")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        one.lane.add_peer("late", msgspec.msgpack.encode(TCPAddress(*server.getsockname(), b"s")))
        some = rows(one.words, (0, 8))
        state, error = end(one.post("READ", "late", some, some))
        assert state is XferState.ERR
        assert "refused" in error
        server.listen(5)
        for _ in range(2):  # also after a loss
            write = one.post("WRITE", "late", some, some)
            raw = Raw(server.accept()[0])
            assert [raw.receive()[0] for _ in range(3)] == [HELLO, WRITE, DATA]
            raw.end.close()
            assert end(write)[0] is XferState.ERR


def test_a_host_that_does_not_answer_holds_up_nobody(pair: tuple[LaneHere, LaneHere]) -> None:
    one, owner = pair
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as queue:
        for _ in range(4):  # more than it takes
            end_of_other = queue.enter_context(socket.socket())
            end_of_other.setblocking(False)
            end_of_other.connect_ex(server.getsockname())
        one.lane.add_peer("silent", msgspec.msgpack.encode(TCPAddress(*server.getsockname(), b"s")))
        some = rows(one.words, (0, 8))
        began = time.monotonic()
        read = one.post("READ", "silent", some, some)
        assert end(one.post("READ", "owner", some, rows(owner.words, (8, 8))))[0] is XferState.DONE
        assert time.monotonic() - began < 1
        assert read.state is XferState.PROC
        assert end(read)[0] is XferState.ERR
        assert time.monotonic() - began < 8


def test_a_peer_killed_while_it_is_read_ends_the_read(side: Side) -> None:
    assert isinstance(side.owner, OwnerProcess)
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    read = side.make_everything("READ", times=40)
    with side.owner.frozen():
        side.agent.transfer(read)
        side.owner.kill()
    assert side.end(read) == "ERR"
    assert read.error


def test_a_frozen_peer_gets_nothing_after_it_was_removed(side: Side) -> None:
    assert isinstance(side.owner, OwnerProcess)
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    write = side.make("WRITE", [0], [2])
    with side.owner.frozen():
        side.agent.transfer(write)
        assert side.agent.check_xfer_state(write) == "PROC"
        side.agent.fence()
        assert side.agent.check_xfer_state(write) == "ERR"
    side.meet(side.owner)
    assert side.run(side.make("WRITE", [0], [3])) == "DONE"
    content = side.owner.call("content").reshape(NUM_BLOCKS, -1)
    np.testing.assert_array_equal(content[3], side.block(0))


def test_a_lane_that_is_closed_leaves_nothing_open(lanes: Callable[..., LaneHere]) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one, other = LaneHere("one"), LaneHere("other")
        one.lane.add_peer("other", other.lane.address())
        one.lane.send_notif("other", b"hello")
        wait_for("the notification", lambda other=other: other.notifs)
        other.lane.fence()
        one.thread.close()
        other.thread.close()
        with pytest.raises(TransportError, match="closed"):
            one.lane.register(one.region)
    assert len(os.listdir("/proc/self/fd")) == num_open


# -- addresses


def test_the_lane_listens_where_it_is_told_only(
    lanes: Callable[..., LaneHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lanes("one", "127.0.0.3").address.host == "127.0.0.3"
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.7"):
        create_agent("me", "ucx", "203.0.113.7")
    monkeypatch.setenv("POD_IP", "203.0.113.8")
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.8"):
        create_agent("me", "ucx")
    create_agent("me", "ucx", "127.0.0.1").close()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6_hosts(lanes: Callable[..., LaneHere]) -> None:
    one, owner = lanes("one", "::1"), lanes("owner", "::1")
    one.lane.add_peer("owner", owner.lane.address())
    assert end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0] is XferState.DONE
    assert one.words[:8].tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    "address",
    [b"", b"\xc1", *(msgspec.msgpack.encode(TCPAddress(h, p, b"")) for h, p in (("a.example", 1), ("::", 0)))],
)
def test_addresses_that_are_none_are_refused(lanes: Callable[..., LaneHere], address: bytes) -> None:
    one = lanes("one")
    with pytest.raises((ValueError, msgspec.DecodeError)):
        one.lane.add_peer("x", address)
    with pytest.raises(TransportError, match="not known"):
        one.lane.send_notif("x", b"hello")


# -- which way


@pytest.mark.parametrize("network", ["memory access", "none"])
def test_host_memory_goes_over_ucx_where_the_network_accesses_it(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    if network == "memory access":
        emulate_network_access(monkeypatch.setattr)
    over_tcp: list[Transfer] = []
    begin = TCPLane.begin
    monkeypatch.setattr(TCPLane, "begin", lambda lane, transfer: over_tcp.append(transfer) or begin(lane, transfer))
    agent = create_agent("me")
    words = np.arange(16, dtype=np.int64)
    agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
    source, target = ([(words.ctypes.data + offset, 64, 0)] for offset in (0, 64))
    handle = agent.initialize_xfer("READ", agent.get_xfer_descs(target), agent.get_xfer_descs(source), "me")
    agent.transfer(handle, b"done")
    wait_for("the notification", lambda: agent.get_new_notifs() == {"me": [b"done"]})
    wait_for("the end", lambda: agent.check_xfer_state(handle) == "DONE")
    assert words[8:].tolist() == words[:8].tolist()
    assert len(over_tcp) == (network == "none")
    agent.close()


def test_host_memory_goes_over_tcp_where_ucx_says_it_would_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr("baton_kv_transfer.transports.ucx_endpoints.has_network_access", lambda tls: True)
    agent = create_agent("me")
    words = np.arange(16, dtype=np.int64)
    agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
    source, target = ([(words.ctypes.data + offset, 64, 0)] for offset in (0, 64))
    handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(source), agent.get_xfer_descs(target), "me")
    agent.transfer(handle, b"done")
    wait_for("the end", lambda: agent.check_xfer_state(handle) == "DONE")
    assert words[8:].tolist() == words[:8].tolist()
    assert agent.get_new_notifs() == {"me": [b"done"]}
    agent.close()
