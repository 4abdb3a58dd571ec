"""A store under attack: who has no key stays out, and no client gets more time, memory or descriptors than is good for others."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from baton_engine import untrusted
from baton_engine.distributed.store import server as store_server
from baton_engine.distributed.store import values as store_values
from baton_engine.distributed.store.handshake import Challenge, Hello, Proof, authenticate
from baton_engine.distributed.store.server import StoreServer, open_store
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import LENGTH, Answer, CountKeys, Get, Set, exchange, frame
from support.waiting import eventually

HOST = "127.0.0.1"
WAIT_S = 60.0
AT_ONCE_S = 10.0
SECRET, ANOTHER = b"s" * 32, b"t" * 32


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with contextlib.closing(open_store(HOST)) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Store:
    return connect_store(server.address, WAIT_S)


@pytest.fixture
def locked() -> Iterator[StoreServer]:
    """One with a secret."""
    with contextlib.closing(open_store(HOST, secret=SECRET)) as server:
        yield server


def connection_to(server: StoreServer) -> socket.socket:
    connection = socket.create_connection(server.address, AT_ONCE_S)
    connection.settimeout(AT_ONCE_S)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """By the other side, within AT_ONCE_S; what it said before is read."""
    received(connection)
    return True


def received(connection: socket.socket) -> int:
    """Bytes, until the other side closes it, within AT_ONCE_S."""
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            total += len(data)
    return total


def deadline() -> float:
    return time.monotonic() + AT_ONCE_S


# One client, and the others


def test_who_asks_again_before_it_is_answered_is_dropped(server: StoreServer, store: Store) -> None:
    """So no client makes a store keep more than one answer, or work longer than one request takes."""
    store.multi_set([f"key {n}" for n in range(8)], ["x" * 100_000] * 8)
    ask = frame(Get([f"key {n}" for n in range(8)]))
    with connection_to(server) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(ask * 3000)  # and never reads
        assert store.num_keys() == 8
        assert received(stranger) < 2 * 8 * 100_000, "no second answer was begun"


def test_a_client_that_does_not_fetch_its_answer_keeps_one(
    server: StoreServer, store: Store
) -> None:
    keys = [f"key {number}" for number in range(12)]
    for key in keys:
        store.set(key, "x" * (2**20 - 100))
    with connection_to(server) as stranger:
        stranger.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16
        )  # the answer cannot be on its way as a whole
        stranger.sendall(frame(Get(keys)))
        eventually(
            lambda: server._num_buffered > 0,
            timeout_s=AT_ONCE_S,
            what="an answer that is not fetched",
        )
        assert server._num_buffered <= 12 * 2**20
        stranger.sendall(frame(Get(keys)))
        eventually(
            lambda: server._num_buffered == 0,
            timeout_s=AT_ONCE_S,
            what="nothing kept for who asks for more",
        )
        assert is_closed(stranger)


def test_when_too_much_is_kept_for_clients_the_one_with_most_goes(
    server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_BUFFERED_BYTES", 2**20)
    small, large = connection_to(server), connection_to(server)
    with small, large:
        small.sendall(LENGTH.pack(2**18) + bytes(2**17))
        large.sendall(LENGTH.pack(2**20) + bytes(2**20 - 1))  # never complete
        assert is_closed(large)
        small.sendall(bytes(2**17 - 1))
        assert store.num_keys() == 0
        small.setblocking(False)
        with pytest.raises(BlockingIOError):
            small.recv(1)


def test_one_key_thousands_of_times_is_refused(store: Store) -> None:
    store.set("key", "x" * 10_000)
    for count in (2_000, store_values.MAX_KEYS_AT_ONCE + 1):
        with pytest.raises(
            DistStoreError, match=r"refused Get.*(the values have|one request may name)"
        ):
            store.multi_get(["key"] * count)
    with pytest.raises(DistStoreError, match="one request may name"):
        store.check(["key"] * (store_values.MAX_KEYS_AT_ONCE + 1))
    assert store.multi_get(["key"] * 1_000) == [b"x" * 10_000] * 1_000


def test_what_it_holds_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_value_is_no_longer_than_could_be_set_at_once(store: Store) -> None:
    store.set("key", "x" * 2**19)
    with pytest.raises(DistStoreError, match="values have at most"):
        store.append("key", "x" * (2**19 + 1))
    store.set("number", "9" * 5000)
    with pytest.raises(DistStoreError, match="is not a number"):
        store.add("number", 1)


def test_many_that_wait_for_large_answers_leave_time_to_the_others(
    server: StoreServer, store: Store
) -> None:
    keys = [f"key {number}" for number in range(14)]
    for key in keys:
        store.set(key, "x" * (2**20 - 100))
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stranger = stack.enter_context(connection_to(server))
            stranger.sendall(frame(Get([*keys, "last"])))
        eventually(
            lambda: len(server._waiting.get("last", ())) == 12, timeout_s=AT_ONCE_S, what="all wait"
        )
        store.set("last", "1")
        started = time.monotonic()
        assert store.num_keys() == 15
        assert time.monotonic() - started < AT_ONCE_S


def test_who_waits_and_goes_is_forgotten(server: StoreServer, store: Store) -> None:
    with connection_to(server) as stranger:
        stranger.sendall(frame(Get(["one", "two"])))
        eventually(lambda: "one" in server._waiting, timeout_s=AT_ONCE_S, what="it waits")
        store.set("one", "1")
        eventually(
            lambda: "two" in server._waiting, timeout_s=AT_ONCE_S, what="it waits for the other"
        )
    eventually(lambda: not server._waiting, timeout_s=AT_ONCE_S, what="nobody waits")


# Connections


def test_a_full_store_refuses_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_CLIENTS", 3)
    with contextlib.closing(open_store(HOST)) as server, contextlib.ExitStack() as stack:
        store = connect_store(server.address, WAIT_S)
        store.set("key", "value")
        idle = [stack.enter_context(connection_to(server)) for _ in range(2)]
        assert is_closed(stack.enter_context(connection_to(server)))
        assert store.get("key") == b"value"
        idle[0].close()
        eventually(lambda: len(server._clients) == 2, timeout_s=AT_ONCE_S, what="room again")
        assert connect_store(server.address, WAIT_S).get("key") == b"value"


def test_without_descriptors_those_who_are_there_are_served_on(
    server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those who are not, once there are some again."""
    monkeypatch.setattr(store_server, "ACCEPT_PAUSE_S", 5.0)
    store.set("key", "value")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (spare, before[1])
        )  # those that are open stay so
        waiting.settimeout(WAIT_S)
        waiting.connect(server.address)
        eventually(
            lambda: server._accept_again_at is not None, timeout_s=AT_ONCE_S, what="no descriptor"
        )
        started = time.monotonic()
        for _ in range(20):
            assert store.get("key") == b"value"
        assert time.monotonic() - started < 4.5, "they wait for a pause to end"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(spare)
    with waiting:
        assert exchange(waiting, frame(CountKeys()), Answer, deadline()).number == 1


def test_neither_side_waits_for_acknowledgements(server: StoreServer, store: Store) -> None:
    store.set("key", "value")
    ends = [*(client.socket for client in server._clients), *store._idle]  # type: ignore[attr-defined]
    assert len(ends) == 2
    assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends)


def test_nonsense_is_logged_once_with_a_count_and_in_one_line(
    server: StoreServer,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)

    def shout() -> None:
        with connection_to(server) as stranger:
            stranger.sendall(b"\xff" * 8)
            assert is_closed(stranger)

    for _ in range(20):
        shout()
    assert len([record for record in caplog.records if "dropped a client" in record.message]) == 1
    monkeypatch.setattr(server._log, "_interval_s", 0.0)
    server._log._next = 0.0
    shout()
    eventually(
        lambda: "and 19 more warnings of this kind" in caplog.text,
        timeout_s=AT_ONCE_S,
        what="the count",
    )


def test_foreign_text_is_one_line_of_a_log() -> None:
    assert untrusted.one_line("a\n2026-01-01 ERROR forged\x1b[2J\u2028\ud800") == (
        "a\\n2026-01-01 ERROR forged\\x1b[2J\\u2028\\ud800"
    )
    assert len(untrusted.one_line("x" * 10**6)) < 400


# The secret


def test_with_the_secret_a_store_is_as_ever(locked: StoreServer) -> None:
    store = connect_store(locked.address, WAIT_S, SECRET)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(store.get, "key") for _ in range(4)]
        store.set("key", "value")
        assert [answer.result(WAIT_S) for answer in answers] == [b"value"] * 4


@pytest.mark.parametrize(
    "said",
    [
        frame(CountKeys()),
        frame(Set({"key": b"forged"})),
        frame(Get(["key"])),
        frame(Hello(b"short")),
        frame(Proof(bytes(32))),
        LENGTH.pack(2**20),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_without_the_secret_nothing_is_read_or_set(said: bytes, locked: StoreServer) -> None:
    store = connect_store(locked.address, WAIT_S, SECRET)
    store.set("key", "value")
    with connection_to(locked) as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert store.get("key") == b"value"
    assert store.num_keys() == 1


def test_another_secret_is_none(locked: StoreServer) -> None:
    with pytest.raises(TimeoutError, match="the store has another service's key"):
        connect_store(locked.address, 0.3, ANOTHER)
    with connection_to(locked) as stranger:
        challenge = exchange(stranger, frame(Hello(bytes(32))), Challenge, deadline())
        stranger.sendall(frame(Proof(challenge.proof)))  # the store's own proof is not a client's
        assert stranger.recv(1) == b""
    with connection_to(locked) as stranger:
        exchange(stranger, frame(Hello(bytes(32))), Challenge, deadline())
        stranger.sendall(frame(Hello(bytes(32))))
        assert stranger.recv(1) == b""


def test_a_proof_is_good_for_one_connection(locked: StoreServer) -> None:
    said: list[bytes] = []

    class Recorder:
        """A connection that notes what is sent."""

        def __init__(self, connection: socket.socket) -> None:
            self._connection = connection

        def sendall(self, data: bytes) -> None:
            said.append(data)
            self._connection.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    with connection_to(locked) as friend:
        authenticate(Recorder(friend), SECRET, deadline())  # type: ignore[arg-type]
    with connection_to(locked) as stranger:
        exchange(stranger, said[0], Challenge, deadline())
        stranger.sendall(said[1])
        assert stranger.recv(1) == b""


def test_a_client_with_the_secret_does_not_speak_with_a_store_without(server: StoreServer) -> None:
    with pytest.raises(TimeoutError, match="no store responded"):
        connect_store(server.address, 0.3, SECRET)
    assert connect_store(server.address, WAIT_S).num_keys() == 0


def test_a_client_without_the_secret_learns_that_it_is_not_wanted(locked: StoreServer) -> None:
    store = connect_store(locked.address, WAIT_S)
    with pytest.raises(DistNetworkError, match="is gone"):
        store.num_keys()


def test_strangers_have_little_time_and_little_room(
    locked: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "_max_unauthenticated", 20)
    store = connect_store(locked.address, WAIT_S, SECRET)
    store.set("key", "value")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connection_to(locked)) for _ in range(30)]
        for stranger in strangers[:10]:
            assert is_closed(stranger)
        eventually(
            lambda: len(locked._unauthenticated) == 20,
            timeout_s=AT_ONCE_S,
            what="the others are there",
        )
        assert connect_store(locked.address, WAIT_S, SECRET).get("key") == b"value"
        assert store.get("key") == b"value"
    eventually(lambda: not locked._unauthenticated, timeout_s=AT_ONCE_S, what="all have gone")
    monkeypatch.setattr(store_server, "HANDSHAKE_TIMEOUT_S", 0.2)
    with connection_to(locked) as stranger:
        stranger.sendall(b"\0")
        assert is_closed(stranger)
    assert store.get("key") == b"value"
