"""Limits of the store: authentication, and the time, memory and descriptors per client."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from baton_engine import bounded_log
from baton_engine.distributed.store import store_server
from baton_engine.distributed.store import values as store_values
from baton_engine.distributed.store.handshake import Challenge, Proof, StoreHello, authenticate
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.distributed.store.wire import (
    LENGTH,
    CountKeys,
    Get,
    Set,
    StoreReply,
    exchange,
    frame,
)
from support.waiting import eventually

HOST = "127.0.0.1"
WAIT_S = 60.0
AT_ONCE_S = 10.0
SECRET, ANOTHER = b"s" * 32, b"t" * 32


@pytest.fixture
def locked() -> Iterator[StoreServer]:
    """A store with a secret."""
    with contextlib.closing(open_store(HOST, secret=SECRET)) as server:
        yield server


def connection_to(server: StoreServer) -> socket.socket:
    connection = socket.create_connection(server.address, AT_ONCE_S)
    connection.settimeout(AT_ONCE_S)
    return connection


def is_served(server: StoreServer) -> bool:
    with contextlib.suppress(OSError), connection_to(server) as connection:
        return exchange(connection, frame(CountKeys()), StoreReply, deadline()).number > 0
    return False


def read_until_closed(connection: socket.socket) -> int:
    """Read until the other side closes the connection, at most AT_ONCE_S; return the bytes."""
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            total += len(data)
    return total


def deadline() -> float:
    return time.monotonic() + AT_ONCE_S


# Limits per client


def test_a_client_with_a_second_request_before_its_answer_is_dropped(
    server: StoreServer, store: Store
) -> None:
    """The store handles one request of a client at a time, so it holds one answer at most."""
    store.multi_set([f"key {n}" for n in range(8)], ["x" * 100_000] * 8)
    ask = frame(Get([f"key {n}" for n in range(8)]))
    with connection_to(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(ask * 3000)  # without reading
        assert store.num_keys() == 8
        assert read_until_closed(connection) < 2 * 8 * 100_000, "the store started a second answer"


def test_a_client_that_does_not_read_its_answer_occupies_one(
    server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request closes its connection and frees the buffer for another client's answer."""
    keys, size = [f"key {number}" for number in range(12)], 2**20 - 100
    monkeypatch.setattr(store_server, "MAX_BUFFERED_BYTES", 12 * 2**20)
    for key in keys:
        store.set(key, "x" * size)
    for _ in range(3):
        with connection_to(server) as connection:
            # The buffers of the sockets are smaller than the answer.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            connection.sendall(frame(Get(keys)))
            assert connection.recv(1), "the answer has begun"
            with contextlib.suppress(ConnectionError):
                while True:
                    connection.sendall(frame(Get(keys)))
    with connection_to(server) as connection:
        connection.sendall(frame(Get(keys)))
        assert connection.recv(1), "the answer has begun"
        assert store.num_keys() == 12
        assert len(connection.makefile("rb").read(12 * size)) == 12 * size


def test_the_client_with_the_most_buffered_bytes_is_dropped_at_the_limit(
    server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_BUFFERED_BYTES", 2**20)
    small, large = connection_to(server), connection_to(server)
    with small, large:
        small.sendall(LENGTH.pack(2**18) + bytes(2**17))
        large.sendall(LENGTH.pack(2**20) + bytes(2**20 - 1))  # one byte is missing
        read_until_closed(large)
        small.sendall(bytes(2**17 - 1))
        assert store.num_keys() == 0
        small.setblocking(False)
        with pytest.raises(BlockingIOError):
            small.recv(1)


def test_a_request_with_thousands_of_keys_is_refused(store: Store) -> None:
    store.set("key", "x" * 10_000)
    for count in (2_000, store_values.MAX_KEYS_AT_ONCE + 1):
        with pytest.raises(
            DistStoreError, match=r"refused Get.*(the values have|a request has at most)"
        ):
            store.multi_get(["key"] * count)
    with pytest.raises(DistStoreError, match="a request has at most"):
        store.check(["key"] * (store_values.MAX_KEYS_AT_ONCE + 1))
    assert store.multi_get(["key"] * 1_000) == [b"x" * 10_000] * 1_000


def test_the_numbers_of_keys_and_bytes_are_limited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_values, "MAX_KEYS", 3)
    monkeypatch.setattr(store_values, "MAX_BYTES", 1000)
    store.multi_set(["a", "b", "c"], ["1", "1", "x" * 900])
    with pytest.raises(DistStoreError, match="the store is full: it holds 3 keys"):
        store.set("d", "1")
    for call in (lambda: store.append("a", "x" * 100), lambda: store.set("b", "x" * 100)):
        with pytest.raises(DistStoreError, match="the store is full: it holds 1000 bytes"):
            call()
    store.set("c", "x" * 800)
    store.append("a", "x" * 100)
    assert store.delete_key("c")
    store.set("d", "x" * 800)
    assert store.multi_get(["a", "b"]) == [b"1" + b"x" * 100, b"1"]


def test_the_length_of_a_value_is_limited(store: Store) -> None:
    store.set("key", "x" * 2**19)
    with pytest.raises(DistStoreError, match="values have at most"):
        store.append("key", "x" * (2**19 + 1))
    store.set("number", "9" * 5000)
    with pytest.raises(DistStoreError, match="is not a number"):
        store.add("number", 1)


def test_many_large_answers_do_not_delay_other_clients(server: StoreServer, store: Store) -> None:
    keys = [f"key {number}" for number in range(14)]
    for key in keys:
        store.set(key, "x" * (2**20 - 100))
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(connection_to(server))
            exchange(connection, frame(CountKeys()), StoreReply, deadline())
            connection.sendall(frame(Get([*keys, "last"])))
        store.set("last", "1")
        started = time.monotonic()
        assert store.num_keys() == 15
        assert time.monotonic() - started < AT_ONCE_S


def test_the_waits_of_a_disconnected_client_are_removed(server: StoreServer, store: Store) -> None:
    with connection_to(server) as connection:
        connection.sendall(frame(Get(["one", "two"])))
        eventually(lambda: server._waiting, timeout_s=AT_ONCE_S, what="the client waits")
        store.set("one", "1")
        assert store.num_keys() == 1, "the client waits for the second key"
    eventually(lambda: not server._waiting, timeout_s=AT_ONCE_S, what="no client waits")


# Connections


def test_a_store_with_too_many_clients_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_CLIENTS", 3)
    with contextlib.closing(open_store(HOST)) as server, contextlib.ExitStack() as stack:
        store = connect_store(server.address, WAIT_S)
        store.set("key", "value")
        idle = [stack.enter_context(connection_to(server)) for _ in range(2)]
        read_until_closed(stack.enter_context(connection_to(server)))
        assert store.get("key") == b"value"
        idle[0].close()
        eventually(lambda: is_served(server), timeout_s=AT_ONCE_S, what="a new client is served")


def test_connected_clients_are_served_when_descriptors_run_out(
    server: StoreServer,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """New clients are accepted when descriptors are free again."""
    monkeypatch.setattr(store_server, "ACCEPT_PAUSE_S", 5.0)
    store.set("key", "value")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))  # open ones stay open
        waiting.settimeout(WAIT_S)
        waiting.connect(server.address)
        eventually(
            lambda: "the rendezvous store cannot accept a connection" in caplog.text,
            timeout_s=AT_ONCE_S,
            what="the store has no descriptor left",
        )
        started = time.monotonic()
        for _ in range(20):
            assert store.get("key") == b"value"
        assert time.monotonic() - started < 4.5, (
            "connected clients wait for the end of the accept pause"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(spare)
    with waiting:
        assert exchange(waiting, frame(CountKeys()), StoreReply, deadline()).number == 1


def test_both_sides_set_tcp_nodelay(server: StoreServer, store: Store) -> None:
    store.set("key", "value")
    ends = [
        end
        for end in psutil.Process().net_connections("tcp")
        if end.status == psutil.CONN_ESTABLISHED and server.address in (end.laddr, end.raddr)
    ]
    assert len(ends) == 2
    for end in ends:
        with socket.socket(fileno=os.dup(end.fd)) as copy:
            assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_invalid_messages_are_logged_once_with_a_count(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(bounded_log, "time", clock)

    def send_invalid() -> None:
        with connection_to(server) as connection:
            connection.sendall(b"\xff" * 8)
            read_until_closed(connection)

    for _ in range(20):
        send_invalid()
    assert len([record for record in caplog.records if "dropped a client" in record.message]) == 1
    clock.monotonic = lambda: bounded_log.LOG_INTERVAL_S
    send_invalid()
    eventually(
        lambda: "and 19 more warnings of this kind" in caplog.text,
        timeout_s=AT_ONCE_S,
        what="the count",
    )


def test_untrusted_text_is_logged_as_one_line() -> None:
    assert bounded_log.one_line("a\n2026-01-01 ERROR forged\x1b[2J\u2028\ud800") == (
        "a\\n2026-01-01 ERROR forged\\x1b[2J\\u2028\\ud800"
    )
    assert len(bounded_log.one_line("x" * 10**6)) < 400


# The secret


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
