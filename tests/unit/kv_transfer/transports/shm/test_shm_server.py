"""The server of the shared-memory transport with untrusted clients."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from baton_kv_transfer.transports.iovec import pack, pack_run
from baton_kv_transfer.transports.shm import shm_server as messages
from baton_kv_transfer.transports.shm.cross_memory import ProcessNonce
from baton_kv_transfer.transports.shm.shm_server import HostAddress, SHMServer
from baton_kv_transfer.transports.sockets import peer_link, peer_server
from baton_kv_transfer.transports.sockets.framed_socket import FramedSocket
from baton_kv_transfer.transports.transfer import Region, XferState
from baton_kv_transfer.transports.transport import TransportContext
from baton_kv_transfer.transports.transport_thread import TransportThread
from support.kv_transfer.shm_rig import WORDS, SHMTransportHere
from support.kv_transfer.transport_rig import end, fail_to_accept, rows
from support.waiting import eventually


@pytest.mark.parametrize(
    "hello", ["none", "wrong nonce", "no peer's nonce", "garbage", "deep", "nothing but bytes"]
)
def test_a_client_without_a_valid_proof_is_disconnected(
    transports: Callable[[str], SHMTransportHere], hello: str
) -> None:
    owner, nonce = transports("owner"), ProcessNonce()
    address = owner.address
    end_of_stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end_of_stranger.connect(address.socket_name)
    link = FramedSocket(end_of_stranger)
    source, target = rows(np.zeros(8, dtype=np.int64), (0, 8)), rows(owner.words, (8, 8))
    request = messages.encode_write(b"", pack(source), pack(target))
    if hello == "none":
        link.send(peer_link.WRITE, 1, request)
    elif hello == "nothing but bytes":
        end_of_stranger.setblocking(True)
        end_of_stranger.sendall(b"\xff" * 64)
    elif hello == "deep":
        link.send(peer_link.HELLO, 0, b"\x95\xc4\x00\xa1x\x01\xc4\x00" + b"\x91" * 4000 + b"\xc0")
    else:
        struct = messages.SHMHello(address.nonce, "stranger", nonce.address, nonce.value)
        if hello == "wrong nonce":
            struct.peer_nonce = b"0" * 16
        elif hello == "no peer's nonce":
            struct.nonce = b"1" * 16
        link.send(
            peer_link.HELLO, 0, b"\xc1" if hello == "garbage" else msgspec.msgpack.encode(struct)
        )
    end_of_stranger.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert end_of_stranger.recv(1) == b""
    end_of_stranger.close()
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    peer = transports("peer")
    assert peer.knows(address)
    eventually(lambda: owner.notifs == [("peer", b"hello")], "a word of a real peer")


def connect_to(owner: SHMTransportHere, nonce: ProcessNonce) -> FramedSocket:
    """Connect, send a valid hello, and return the connection."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(owner.address.socket_name)
    link = FramedSocket(end)
    hello = messages.SHMHello(owner.address.nonce, "client", nonce.address, nonce.value)
    link.send(peer_link.HELLO, 0, msgspec.msgpack.encode(hello))
    return link


def received_from(link: FramedSocket) -> tuple[int, int, bytes]:
    """Wait for one message of the other side."""
    received: list[tuple[int, int, bytes]] = []

    def has_arrived() -> bool:
        received.extend(link.receive())
        return bool(received)

    eventually(has_arrived, "a message")
    return received[0]


def test_lengths_that_cancel_each_other_are_refused_before_a_copy_is_prepared(
    transports: Callable[[str], SHMTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing a copy splits its runs, and takes memory for each part of such a length."""
    monkeypatch.setattr(messages, "BatchedCopy", None)
    owner = transports("owner")
    link = connect_to(owner, nonce := ProcessNonce())
    runs = pack_run(0, 2**44) + pack_run(0, 2**23 - 2**44)
    link.send(peer_link.WRITE, 1, messages.encode_write(b"n", runs, runs))
    kind, number, error = received_from(link)
    assert (kind, number) == (peer_link.ANSWER, 1)
    assert b"2 of 2 descriptors are outside" in error
    link.send(peer_link.NOTIF, 2, b"hello")
    eventually(lambda: owner.notifs == [("client", b"hello")], "a later message")
    link.close()
    nonce.clear()


def test_a_message_of_unknown_kind_ends_the_connection(
    transports: Callable[[str], SHMTransportHere],
) -> None:
    link = connect_to(transports("owner"), nonce := ProcessNonce())
    link.send(99, 1, b"?")
    with pytest.raises(ConnectionError, match=r"closed|reset"):
        received_from(link)
    link.close()
    nonce.clear()


def test_the_unfinished_writes_of_a_client_are_limited(
    transports: Callable[[str], SHMTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "MAX_UNFINISHED", 0)
    owner = transports("owner")
    link = connect_to(owner, nonce := ProcessNonce())
    run = pack(rows(owner.words, (0, 8)))
    link.send(peer_link.WRITE, 1, messages.encode_write(b"", run, run))
    with pytest.raises(ConnectionError, match=r"closed|reset"):
        received_from(link)
    link.close()
    nonce.clear()


def test_without_free_descriptors_accepting_pauses(
    transports: Callable[[str], SHMTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "ACCEPT_PAUSE_S", 0.1)
    tries = fail_to_accept(monkeypatch, times=3)
    owner, peer = transports("owner"), transports("peer")
    assert peer.knows(owner.address)
    eventually(lambda: owner.notifs == [("peer", b"hello")], "a word of a client")
    assert tries[2] - tries[0] >= 0.2


def test_silent_clients_are_disconnected_and_do_not_block_others(
    transports: Callable[[str], SHMTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = transports("owner")
    address = owner.address

    def connect() -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(10)
        end.connect(address.socket_name)
        return end

    monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 60.0)
    monkeypatch.setattr(peer_server, "MAX_UNAUTHENTICATED", 3)
    with contextlib.ExitStack() as closing:
        strangers = [closing.enter_context(connect()) for _ in range(5)]
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
        peer = transports("peer")
        assert peer.knows(address)
        eventually(lambda: owner.notifs == [("peer", b"hello")], "a word of a real peer")
        monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 0.05)
        assert closing.enter_context(connect()).recv(1) == b""


def test_a_write_with_an_invalid_row_is_refused_as_a_whole(
    transports: Callable[[str], SHMTransportHere],
) -> None:
    writer, owner = transports("writer"), transports("owner")
    writer.words[:] = -1
    writer.transport.add_peer("owner", owner.transport.address)
    elsewhere = np.zeros(8, dtype=np.int64)

    def write(*targets: NDArray[np.int64]) -> tuple[XferState, str]:
        remote = np.concatenate(targets)
        return end(
            writer.post("WRITE", "owner", rows(writer.words, *[(0, 8)] * len(remote)), remote, b"n")
        )

    state, error = write(rows(owner.words, (0, 8)), rows(elsewhere, (0, 8)))
    assert state is XferState.ERR
    assert "1 of 2 descriptors are outside the memory registered there" in error
    assert owner.context.num_refused == 1
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))
    assert not elsewhere.any()
    assert not owner.notifs
    assert write(rows(owner.words, (0, 8)))[0] is XferState.DONE
    assert (owner.words[:8] == -1).all()
    assert owner.notifs == [("writer", b"n")]
    owner.context.regions.clear()
    owner.thread.commands.call(lambda: owner.transport.forget_region(owner.region))
    assert write(rows(owner.words, (8, 8)))[0] is XferState.ERR
    assert (owner.words[8:] == np.arange(8, WORDS)).all()


def test_deregistered_memory_is_not_written_if_a_client_disconnects_at_the_same_time() -> None:
    thread = TransportThread("transport-owner")
    context = TransportContext(thread, "owner", "", lambda sender, message: None, lambda: None)
    clients = SHMServer(context)
    memory, source, nonce = np.zeros(2**22, dtype=np.int64), np.full(2**22, 9), ProcessNonce()
    region = Region(memory.ctypes.data, memory.nbytes)
    clients.open()
    context.regions.append(region)
    address = msgspec.msgpack.decode(clients.address, type=HostAddress)
    request = messages.encode_write(
        b"", pack(rows(source, (0, 2**22))), pack(rows(memory, (0, 2**22)))
    )

    def connect() -> FramedSocket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(address.socket_name)
        link = FramedSocket(end)
        hello = messages.SHMHello(address.nonce, "client", nonce.address, nonce.value)
        link.send(peer_link.HELLO, 0, msgspec.msgpack.encode(hello))
        for number in range(1, 4):
            link.send(peer_link.WRITE, number, request)
        return link

    leaving, staying = connect(), connect()
    queued = []

    def forget() -> None:
        """Deregister before the transport detects that a client has disconnected."""
        if len(thread.jobs) < 6:
            thread.call_later(0.0001, forget)
            return
        leaving.close()
        context.regions.clear()
        clients.forget_region(region)
        queued.append(len(thread.jobs))
        memory[:] = 0

    thread.call_later(0.0, forget)
    thread.start(clients.close)
    eventually(lambda: queued, "all writes were queued")
    thread.close()
    assert queued == [0]
    assert not memory.any()
    staying.close()
