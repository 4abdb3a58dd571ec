"""Limits of the store: time, memory and descriptors per client."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from types import SimpleNamespace

import psutil
import pytest
from torch._C._distributed_c10d import Store

from baton_engine import bounded_log
from baton_engine.distributed.store import store_server
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.distributed.store.wire import (
    LENGTH,
    CountKeys,
    Get,
    StoreReply,
    exchange,
    frame,
)
from support.engine.store_clients import AT_ONCE_S, connection_to, deadline, read_until_closed
from support.waiting import eventually

HOST = "127.0.0.1"
WAIT_S = 60.0


def is_served(server: StoreServer) -> bool:
    with contextlib.suppress(OSError), connection_to(server) as connection:
        return exchange(connection, frame(CountKeys()), StoreReply, deadline()).number > 0
    return False


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
