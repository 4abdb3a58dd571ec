"""The transport over TCP: what it stores and sends, where, and what becomes of work when a side or the network goes away."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from baton_kv_transfer.agent.create import create_agent
from baton_kv_transfer.transports.sockets.framed_socket import DATA
from baton_kv_transfer.transports.sockets.peer_link import HELLO, READ, WRITE
from baton_kv_transfer.transports.tcp.tcp_server import Address
from baton_kv_transfer.transports.transfer import TransportError, XferState
from support.kv_transfer.agent_processes import NUM_BLOCKS, OwnerProcess, Side
from support.kv_transfer.tcp_rig import LENGTH, WORDS, Raw, TransportHere, end, rows
from support.waiting import eventually


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side("tcp", OwnerProcess("tcp"))
    yield side
    side.agent.close()
    side.owner.stop()


# -- bytes


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_rows_of_all_sizes_move_and_nothing_beside_them(
    tcp_pair: tuple[TransportHere, TransportHere], op: str
) -> None:
    one, owner = tcp_pair
    one.words[:] = -1 - one.words
    runs = [
        (0, 300_001),
        (300_002, 1),
        *[(300_004 + 3 * i, 2) for i in range(20_000)],
        (400_000, 262_144),
    ]
    local, remote = rows(one.words, *runs), rows(owner.words, *runs)
    source, target = (owner.words, one.words) if op == "READ" else (one.words, owner.words)
    expected = target.copy()
    for first, count in runs:
        expected[first : first + count] = source[first : first + count]
    assert end(one.post(op, "owner", local, remote, b"moved"))[0] is XferState.DONE
    np.testing.assert_array_equal(target, expected)
    eventually(lambda: owner.notifs == [("one", b"moved")], "the notification")


def test_transfers_of_a_peer_take_turns(tcp_transports: Callable[..., TransportHere]) -> None:
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    everything = [(0, WORDS)] * 4
    raw.ask(READ, 1, rows(owner.words, *everything))
    raw.ask(READ, 2, rows(owner.words, *everything))
    numbers = [raw.receive()[1] for _ in range(2 * 4 * WORDS // LENGTH)]
    assert sorted(numbers) == [1] * (4 * WORDS // LENGTH) + [2] * (4 * WORDS // LENGTH)
    begun = numbers.index(2)  # by then the first was ahead
    assert numbers[begun : begun + 8] == [2, 1] * 4
    raw.end.close()


def test_a_notification_does_not_wait_behind_a_long_transfer(
    tcp_pair: tuple[TransportHere, TransportHere],
) -> None:
    one, owner = tcp_pair
    everything = [(0, WORDS)] * 64
    write = one.post("WRITE", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    one.transport.send_notif("owner", b"quick")
    eventually(lambda: owner.notifs, "the notification")
    assert write.state is XferState.PROC
    assert end(write)[0] is XferState.DONE


# -- connections


def test_a_peer_that_was_not_there_is_connected_to_by_the_next_use(
    tcp_transports: Callable[..., TransportHere],
) -> None:
    one = tcp_transports("one")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        one.transport.add_peer("late", msgspec.msgpack.encode(Address(*server.getsockname(), b"s")))
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


def test_a_host_that_does_not_answer_holds_up_nobody(
    tcp_pair: tuple[TransportHere, TransportHere],
) -> None:
    one, owner = tcp_pair
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        contextlib.ExitStack() as queue,
    ):
        for _ in range(4):  # more than it takes
            end_of_other = queue.enter_context(socket.socket())
            end_of_other.setblocking(False)
            end_of_other.connect_ex(server.getsockname())
        one.transport.add_peer(
            "silent", msgspec.msgpack.encode(Address(*server.getsockname(), b"s"))
        )
        some = rows(one.words, (0, 8))
        read = one.post("READ", "silent", some, some)
        assert end(one.post("READ", "owner", some, rows(owner.words, (8, 8))))[0] is XferState.DONE
        assert read.state is XferState.PROC, "the other did not wait for it"
        assert end(read)[0] is XferState.ERR


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


def test_a_transport_that_is_closed_leaves_nothing_open(
    tcp_transports: Callable[..., TransportHere],
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one, other = TransportHere("one"), TransportHere("other")
        one.transport.add_peer("other", other.transport.address)
        one.transport.send_notif("other", b"hello")
        eventually(lambda other=other: other.notifs, "the notification")
        other.thread.mailbox.call(other.transport.fence)
        one.thread.close()
        other.thread.close()
        with pytest.raises(TransportError, match="closed"):
            one.thread.mailbox.call(one.transport.fence)
    assert len(os.listdir("/proc/self/fd")) == num_open


# -- addresses


def test_the_transport_listens_only_where_it_is_configured(
    tcp_transports: Callable[..., TransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tcp_transports("one", "127.0.0.3").address.host == "127.0.0.3"
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.7"):
        create_agent("me", "tcp", "203.0.113.7")
    monkeypatch.setenv("POD_IP", "203.0.113.8")
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.8"):
        create_agent("me", "tcp")
    create_agent("me", "tcp", "127.0.0.1").close()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6_hosts(tcp_transports: Callable[..., TransportHere]) -> None:
    one, owner = tcp_transports("one", "::1"), tcp_transports("owner", "::1")
    one.transport.add_peer("owner", owner.transport.address)
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0]
        is XferState.DONE
    )
    assert one.words[:8].tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\xc1",
        *(msgspec.msgpack.encode(Address(h, p, b"")) for h, p in (("a.example", 1), ("::", 0))),
    ],
)
def test_addresses_that_are_none_are_refused(
    tcp_transports: Callable[..., TransportHere], address: bytes
) -> None:
    one = tcp_transports("one")
    with pytest.raises((ValueError, msgspec.DecodeError)):
        one.transport.add_peer("x", address)
    assert not one.transport.send_notif("x", b"hello")
