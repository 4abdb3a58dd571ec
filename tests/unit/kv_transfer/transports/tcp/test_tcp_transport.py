"""The TCP transport: data, connections, lost peers and addresses."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.sockets.framed_socket import DATA
from baton_kv_transfer.transports.sockets.peer_link import HELLO, READ, WRITE
from baton_kv_transfer.transports.tcp.tcp_server import Address
from baton_kv_transfer.transports.transfer import XferState
from support.kv_transfer.agent_processes import NUM_BLOCKS, Side, own_side
from support.kv_transfer.tcp_rig import LENGTH, Raw, TCPTransportHere
from support.kv_transfer.transport_rig import (
    WORDS,
    end,
    move_rows_of_all_sizes,
    open_and_close,
    rows,
)
from support.waiting import eventually


@pytest.fixture
def side() -> Iterator[Side]:
    yield from own_side("tcp")


# Bytes


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_rows_of_all_sizes_are_moved_and_nothing_else(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere], op: str
) -> None:
    move_rows_of_all_sizes(*tcp_pair, op)


def test_transfers_of_a_peer_share_its_connection(
    tcp_transports: Callable[..., TCPTransportHere],
) -> None:
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    everything = [(0, WORDS)] * 4
    raw.ask(READ, 1, rows(owner.words, *everything))
    raw.ask(READ, 2, rows(owner.words, *everything))
    numbers = [raw.receive()[1] for _ in range(2 * 4 * WORDS // LENGTH)]
    assert sorted(numbers) == [1] * (4 * WORDS // LENGTH) + [2] * (4 * WORDS // LENGTH)
    begun = numbers.index(2)  # until then the first one was ahead
    assert numbers[begun : begun + 8] == [2, 1] * 4
    raw.end.close()


def test_a_notification_does_not_wait_behind_a_long_transfer(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere],
) -> None:
    one, owner = tcp_pair
    everything = [(0, WORDS)] * 64
    write = one.post("WRITE", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    one.transport.send_notif("owner", b"quick")
    eventually(lambda: owner.notifs, "the notification")
    assert write.state is XferState.PROC
    assert end(write)[0] is XferState.DONE


# Connections


def test_an_unreachable_peer_is_reconnected_by_the_next_use(
    tcp_transports: Callable[..., TCPTransportHere],
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
        for _ in range(2):  # also after a lost connection
            write = one.post("WRITE", "late", some, some)
            raw = Raw(server.accept()[0])
            assert [raw.receive()[0] for _ in range(3)] == [HELLO, WRITE, DATA]
            raw.end.close()
            assert end(write)[0] is XferState.ERR


def test_an_unresponsive_host_does_not_delay_other_peers(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere],
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
        assert read.state is XferState.PROC, "the other peer waited for it"
        assert end(read)[0] is XferState.ERR


def test_a_read_fails_when_its_peer_is_killed(side: Side) -> None:
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    read = side.make_everything("READ", times=40)
    with side.owner.frozen():
        side.agent.transfer(read)
        side.owner.kill()
    assert side.end(read) == "ERR"
    assert read.error


def test_a_frozen_peer_gets_no_data_after_its_removal(side: Side) -> None:
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


def test_a_closed_transport_leaves_no_file_open() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_and_close(TCPTransportHere)
    assert len(os.listdir("/proc/self/fd")) == num_open


# Addresses


def test_the_transport_listens_only_at_the_configured_host(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tcp_transports("one", "127.0.0.3").address.host == "127.0.0.3"
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.7"):
        create_agent("me", "tcp", "203.0.113.7")
    monkeypatch.setenv("POD_IP", "203.0.113.8")
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.8"):
        create_agent("me", "tcp")
    create_agent("me", "tcp", "127.0.0.1").close()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6_hosts_are_supported(tcp_transports: Callable[..., TCPTransportHere]) -> None:
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
def test_invalid_addresses_are_refused(
    tcp_transports: Callable[..., TCPTransportHere], address: bytes
) -> None:
    one = tcp_transports("one")
    with pytest.raises((ValueError, msgspec.DecodeError)):
        one.transport.add_peer("x", address)
    assert not one.transport.send_notif("x", b"hello")
