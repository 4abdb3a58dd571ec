"""The handshake of the store: clients with the secret, and all others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistNetworkError

from baton_engine.distributed.store import store_server
from baton_engine.distributed.store.handshake import Challenge, Proof, StoreHello, authenticate
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.distributed.store.wire import (
    LENGTH,
    CountKeys,
    Get,
    Set,
    exchange,
    frame,
)
from support.engine.store_clients import connection_to, deadline, read_until_closed

HOST = "127.0.0.1"
WAIT_S = 60.0
SECRET, ANOTHER = b"s" * 32, b"t" * 32


@pytest.fixture
def locked() -> Iterator[StoreServer]:
    """A store with a secret."""
    with contextlib.closing(open_store(HOST, secret=SECRET)) as server:
        yield server


def test_clients_with_the_secret_are_served(locked: StoreServer) -> None:
    store = connect_store(locked.address, WAIT_S, SECRET)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(store.get, "key") for _ in range(4)]
        store.set("key", "value")
        assert [answer.result(WAIT_S) for answer in answers] == [b"value"] * 4


@pytest.mark.parametrize(
    "message",
    [
        frame(CountKeys()),
        frame(Set({"key": b"forged"})),
        frame(Get(["key"])),
        frame(StoreHello(b"short")),
        frame(Proof(bytes(32))),
        LENGTH.pack(2**20),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_clients_without_the_secret_can_neither_read_nor_set(
    message: bytes, locked: StoreServer
) -> None:
    store = connect_store(locked.address, WAIT_S, SECRET)
    store.set("key", "value")
    with connection_to(locked) as connection:
        connection.sendall(message)
        assert connection.recv(1) == b""
    assert store.get("key") == b"value"
    assert store.num_keys() == 1


def test_clients_with_another_secret_are_refused(locked: StoreServer) -> None:
    with pytest.raises(TimeoutError, match="the rendezvous store has another service's key"):
        connect_store(locked.address, 0.3, ANOTHER)
    with connection_to(locked) as connection:
        challenge = exchange(connection, frame(StoreHello(bytes(32))), Challenge, deadline())
        connection.sendall(frame(Proof(challenge.proof)))  # the store's own proof is not a client's
        assert connection.recv(1) == b""
    with connection_to(locked) as connection:
        exchange(connection, frame(StoreHello(bytes(32))), Challenge, deadline())
        connection.sendall(frame(StoreHello(bytes(32))))
        assert connection.recv(1) == b""


def test_a_proof_is_valid_for_one_connection_only(locked: StoreServer) -> None:
    sent: list[bytes] = []

    class Recorder:
        """A connection that records the sent data."""

        def __init__(self, connection: socket.socket) -> None:
            self._connection = connection

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            self._connection.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    with connection_to(locked) as trusted:
        authenticate(Recorder(trusted), SECRET, deadline())  # type: ignore[arg-type]
    with connection_to(locked) as connection:
        exchange(connection, sent[0], Challenge, deadline())
        connection.sendall(sent[1])
        assert connection.recv(1) == b""


def test_a_client_with_the_secret_does_not_connect_to_a_store_without_one(
    server: StoreServer,
) -> None:
    with pytest.raises(TimeoutError, match="no rendezvous store responded"):
        connect_store(server.address, 0.3, SECRET)
    assert connect_store(server.address, WAIT_S).num_keys() == 0


def test_calls_of_a_client_without_the_secret_fail(locked: StoreServer) -> None:
    store = connect_store(locked.address, WAIT_S)
    with pytest.raises(DistNetworkError, match="is gone"):
        store.num_keys()


def test_unauthenticated_connections_are_limited_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_server, "MAX_UNAUTHENTICATED", 20)
    with contextlib.closing(open_store(HOST, secret=SECRET)) as locked:
        store = connect_store(locked.address, WAIT_S, SECRET)
        store.set("key", "value")
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connection_to(locked)) for _ in range(30)]
            for connection in connections[:10]:
                read_until_closed(connection)
            for connection in connections[10:]:
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):  # it is connected
                    connection.recv(1)
            assert connect_store(locked.address, WAIT_S, SECRET).get("key") == b"value"
            assert store.get("key") == b"value"
        monkeypatch.setattr(store_server, "HANDSHAKE_TIMEOUT_S", 0.2)
        connection_to(locked).close()  # before its deadline
        with connection_to(locked) as connection:
            connection.sendall(b"\0")
            read_until_closed(connection)
        assert store.get("key") == b"value"
