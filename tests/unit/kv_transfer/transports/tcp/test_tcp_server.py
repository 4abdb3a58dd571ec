"""The TCP server with untrusted clients and invalid requests; wrong responses at its clients."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.sockets import peer_server
from baton_kv_transfer.transports.sockets.framed_socket import DATA
from baton_kv_transfer.transports.sockets.peer_link import (
    ANSWER,
    HELLO,
    NOTIF,
    READ,
    WRITE,
    encode_request,
)
from baton_kv_transfer.transports.sockets.row_io import FRAME_BYTES
from baton_kv_transfer.transports.tcp import tcp_server
from baton_kv_transfer.transports.tcp.tcp_server import Address, TCPHello
from baton_kv_transfer.transports.transfer import XferState
from support.kv_transfer.tcp_rig import HEADER, LENGTH, Raw, TCPTransportHere
from support.kv_transfer.transport_rig import WORDS, end, fail_to_accept, rows
from support.waiting import eventually

# Connections and requests


@pytest.mark.parametrize(
    "hello",
    ["none", "wrong secret", "no name", "garbage", "deep", "nothing but bytes", "long", "data"],
)
def test_a_client_without_the_secret_is_disconnected(
    tcp_transports: Callable[..., TCPTransportHere], hello: str
) -> None:
    owner = tcp_transports("owner")
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
    elif hello == "deep":
        raw.send(HELLO, 0, b"\x93\xc4\x00\xa1x" + b"\x91" * 4000 + b"\xc0")
    else:
        secret = b"0" * 16 if hello == "wrong secret" else owner.address.secret
        raw.send(
            HELLO, 0, msgspec.msgpack.encode(TCPHello(secret, "" if hello == "no name" else "raw"))
        )
    assert raw.is_cut_off()
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    peer = tcp_transports("peer")
    peer.transport.add_peer("owner", owner.transport.address)
    peer.transport.send_notif("owner", b"hello")
    eventually(lambda: owner.notifs == [("peer", b"hello")], "a word of a real peer")


def test_silent_clients_are_disconnected_and_do_not_block_others(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tcp_transports("owner")
    monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 60.0)
    monkeypatch.setattr(peer_server, "MAX_UNAUTHENTICATED", 3)
    strangers = [Raw.to(owner, "") for _ in range(5)]
    assert all(stranger.is_cut_off() for stranger in strangers[:2])
    Raw.to(owner).send(NOTIF, 1, b"me")
    eventually(lambda: owner.notifs == [("raw", b"me")], "a notification with the secret")
    monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 0.05)
    assert Raw.to(owner, "").is_cut_off()


def test_a_request_with_an_invalid_row_is_refused_as_a_whole(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere],
) -> None:
    one, owner = tcp_pair
    one.words[:] = -1
    elsewhere = np.zeros(2 * LENGTH, dtype=np.int64)
    bad = np.concatenate((rows(owner.words, (0, 2 * LENGTH)), rows(elsewhere, (0, 2 * LENGTH))))
    local = rows(one.words, (0, 2 * LENGTH), (2 * LENGTH, 2 * LENGTH))
    for number, op in enumerate(("WRITE", "READ"), start=1):
        state, error = end(one.post(op, "owner", local, bad, b"n"))
        assert state is XferState.ERR
        assert "1 of 2 descriptors are outside the memory registered there" in error
        assert owner.context.num_refused == number
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    assert not elsewhere.any()
    assert (one.words == -1).all()
    assert end(one.post("WRITE", "owner", local[:1], bad[:1], b"good"))[0] is XferState.DONE
    assert owner.notifs == [("one", b"good")]
    assert (owner.words[: 2 * LENGTH] == -1).all()


@pytest.mark.parametrize(
    "request_", ["no rows", "half a row", "too much", "number in use", "unknown", "long"]
)
def test_invalid_requests_end_their_connection(
    tcp_transports: Callable[..., TCPTransportHere], request_: str
) -> None:
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    some = rows(owner.words, (0, 8))
    if request_ == "no rows":
        raw.ask(READ, 1, some[:0])
    elif request_ == "half a row":
        raw.send(WRITE, 1, encode_request(b"", pack(some))[:-8])
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


def test_a_client_that_does_not_read_its_answers_is_disconnected(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_little_room(end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(tcp_server, "set_options", leave_little_room)
    monkeypatch.setattr(peer_server, "MAX_UNSENT_BYTES", 2**16)
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    raw.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    refused = rows(np.zeros(1, dtype=np.int64), (0, 1))
    with contextlib.suppress(ConnectionError):
        for number in range(10_000):
            raw.ask(READ, number, refused)
    with contextlib.suppress(ConnectionError):
        while raw.end.recv(2**16):
            pass
    assert 0 < owner.context.num_refused < 10_000


@pytest.mark.parametrize("num_rows", [1, 600], ids=["many", "large"])
def test_the_unfinished_transfers_of_a_client_are_limited(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.setattr(peer_server, "MAX_UNFINISHED", 4 if num_rows == 1 else 100)
    monkeypatch.setattr(peer_server, "MAX_UNFINISHED_BYTES", 40_000)
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    some = rows(owner.words, *[(0, 8)] * num_rows)
    for number in range(4):
        raw.ask(WRITE, number, some)
    raw.send(NOTIF, 9, b"four")
    eventually(lambda: owner.notifs == [("raw", b"four")], "four transfers")
    raw.ask(WRITE, 4, some)
    assert raw.is_cut_off()
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))


def test_lost_clients_are_removed_before_their_handshake_timeout(
    tcp_transports: Callable[..., TCPTransportHere],
) -> None:
    owner = tcp_transports("owner")
    connections = [Raw.to(owner, "") for _ in range(20)]

    def num_clients() -> int:
        return sum(issubclass(type(each), peer_server.PeerClient) for each in gc.get_objects())

    eventually(lambda: num_clients() == 20, "20 clients", every_s=0.1)
    for connection in connections:
        connection.end.close()
    eventually(lambda: not num_clients(), "no client", timeout_s=4.0, every_s=0.1)


def test_without_free_descriptors_accepting_pauses(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "ACCEPT_PAUSE_S", 0.1)
    tries = fail_to_accept(monkeypatch, times=3)
    owner = tcp_transports("owner")
    Raw.to(owner).send(NOTIF, 1, b"late")
    eventually(lambda: owner.notifs == [("raw", b"late")], "a notification of a client")
    assert tries[2] - tries[0] >= 0.2


# Ended transfers


def test_an_interrupted_write_is_not_notified_and_ends_only_its_connection(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere],
) -> None:
    one, owner = tcp_pair
    raw = Raw.to(owner)
    raw.ask(WRITE, 1, rows(owner.words, (0, 2 * LENGTH)), b"all there")
    raw.end.sendall(HEADER.pack(FRAME_BYTES, DATA, 1) + b"\xff" * 1000)
    eventually(lambda: (owner.words[:125] == -1).all(), "the first bytes")
    raw.end.close()
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (200, 8))))[0]
        is XferState.DONE
    )
    np.testing.assert_array_equal(owner.words[125:], np.arange(125, WORDS))
    assert not owner.notifs


def test_a_write_stops_when_its_memory_is_deregistered(
    tcp_transports: Callable[..., TCPTransportHere],
) -> None:
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    raw.ask(WRITE, 1, rows(owner.words, (0, 2 * LENGTH)), b"all there")
    raw.end.sendall(HEADER.pack(FRAME_BYTES, DATA, 1) + b"\xff" * 1000)
    eventually(lambda: (owner.words[:125] == -1).all(), "the first bytes")
    owner.deregister()
    raw.end.sendall(b"\xff" * (FRAME_BYTES - 1000))
    raw.send(DATA, 1, b"\xff" * FRAME_BYTES)
    assert raw.receive() == (ANSWER, 1, b"the memory was deregistered")
    raw.send(NOTIF, 2, b"after it")
    eventually(lambda: owner.notifs == [("raw", b"after it")], "a later message")
    np.testing.assert_array_equal(owner.words[125:], np.arange(125, WORDS))
    raw.end.close()


def test_a_read_stops_when_its_memory_is_deregistered(
    tcp_transports: Callable[..., TCPTransportHere],
) -> None:
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    raw.ask(READ, 1, rows(owner.words, *[(0, WORDS)] * 16))
    assert raw.receive()[:2] == (DATA, 1)
    owner.deregister()
    owner.words[:] = -1
    while (frame := raw.receive())[0] == DATA:
        assert b"\xff" * 8 not in frame[2]
    assert frame == (ANSWER, 1, b"the memory was deregistered")
    raw.end.close()


def test_a_reader_in_the_last_frame_of_deregistered_memory_is_disconnected(
    tcp_transports: Callable[..., TCPTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_little_room(end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(tcp_server, "set_options", leave_little_room)
    owner = tcp_transports("owner")
    raw = Raw.to(owner)
    raw.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.ask(READ, 1, rows(owner.words, (0, LENGTH)))
    assert HEADER.unpack(raw.exactly(HEADER.size)) == (FRAME_BYTES, DATA, 1)
    owner.deregister()
    owner.words[:] = -1
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while some := raw.end.recv(FRAME_BYTES):
            received += some
    assert len(received) < FRAME_BYTES
    assert b"\xff" * 8 not in received
    raw.end.close()


def test_after_a_fence_earlier_data_and_the_old_secret_are_refused(
    tcp_pair: tuple[TCPTransportHere, TCPTransportHere],
) -> None:
    one, owner = tcp_pair
    everything = [(0, WORDS)] * 20
    before = owner.transport.address
    one.words[:] = 7
    write = one.post("WRITE", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    eventually(lambda: owner.words[0] == 7, "the first bytes")
    owner.thread.commands.call(owner.transport.fence)
    owner.words[:] = -5
    assert end(write)[0] is XferState.ERR
    read = one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (0, 8)))
    assert end(read)[0] is XferState.ERR
    assert (owner.words == -5).all()
    assert owner.transport.address != before
    one.transport.add_peer("owner", owner.transport.address)
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (0, 8))))[0]
        is XferState.DONE
    )
    assert (one.words[:8] == -5).all()


@pytest.mark.parametrize("answer", ["nothing", "too early", "too much", "another"])
def test_a_wrong_response_of_the_owner_fails_the_transfer(
    tcp_transports: Callable[..., TCPTransportHere], answer: str
) -> None:
    one = tcp_transports("one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        one.transport.add_peer("liar", msgspec.msgpack.encode(Address(*server.getsockname(), b"s")))
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
