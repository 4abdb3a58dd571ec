"""Random messages to the rendezvous store of a rank. See support/fuzz/fuzz_target.py."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from baton_engine.distributed.store.handshake import Proof, StoreHello, authenticate, store_secret
from baton_engine.distributed.store.wire import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Add,
    Append,
    Check,
    CompareSet,
    CountKeys,
    Delete,
    Get,
    Set,
    StoreAddress,
    StoreReply,
    connect,
    exchange,
    frame,
)
from baton_protocol.service_key import ServiceKey
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.mutations import mutate_bytes
from support.fuzz.raw_client import connect_tcp, send_raw
from support.fuzz.store_server import PORT
from support.fuzz.zmq_client import ANSWER_TIMEOUT_S, mutate_message
from support.pods import Pod, Pods, pods

pytestmark = pytest.mark.timeout(TIMEOUT_S)
REQUESTS: list[msgspec.Struct] = [
    Set({"k1": b"v", "k2": b"w"}),
    Get(["k1", "k2"]),
    Get(["k1", "missing"]),
    Add("n", 2),
    Append("a", b"x"),
    CompareSet("k1", b"v", b"w"),
    Check(["k1", "missing"]),
    Delete("k2"),
    CountKeys(),
]
HANDSHAKE: list[msgspec.Struct] = [StoreHello(bytes(32)), Proof(bytes(32)), *REQUESTS[:2]]
ODD_LENGTHS = (0, MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1, MAX_MESSAGE_BYTES, 2**31, 2**32 - 1)


def make(messages: list[msgspec.Struct], rng: random.Random) -> bytes:
    """Return the bytes of one connection: messages with random changes."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.choice((1, 4, 5, 300, 70_000)))
    count = rng.choice((1, 1, 1, 2, 20))
    data = b"".join(_message(rng.choice(messages), rng) for _ in range(count))
    if kind < 0.2:
        return mutate_bytes(data, rng)
    return data[: rng.randrange(len(data))] if kind < 0.3 else data


def _message(message: msgspec.Struct, rng: random.Random) -> bytes:
    payload = mutate_message(message, rng)
    length = len(payload)
    if rng.random() < 0.1:
        length = rng.choice((*ODD_LENGTHS, length + 1, max(0, length - 1)))
    return LENGTH.pack(length) + payload


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("stores"), 23) as group:
        yield group


@pytest.fixture(scope="module")
def start(group: Pods) -> Callable[[str], Pod]:
    stores: dict[str, Pod] = {}

    def start(key_file: str) -> Pod:
        """Return a store with this key. Stores are shared by the tests."""
        if key_file not in stores:
            arguments = [key_file] if key_file else []
            name = "keyed" if key_file else "open"
            stores[key_file] = group.script(name, "support.fuzz.store_server", *arguments)
            stores[key_file].wait_open(PORT)
        return stores[key_file]

    return start


def connect_to(store: Pod, secret: bytes) -> socket.socket:
    """Connect as a client with this secret."""
    connection = connect(StoreAddress(store.address, PORT), ANSWER_TIMEOUT_S)
    if secret:
        authenticate(connection, secret, time.monotonic() + ANSWER_TIMEOUT_S)
    return connection


def check_answers(store: Pod, secret: bytes) -> None:
    """Set, get and delete a key."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    expected: list[tuple[msgspec.Struct, StoreReply]] = [
        (Set({"honest": b"v"}), StoreReply()),
        (Get(["honest"]), StoreReply([b"v"])),
        (Delete("honest"), StoreReply(number=1)),
    ]
    with connect_to(store, secret) as connection:
        for request, answer in expected:
            assert exchange(connection, frame(request), StoreReply, deadline) == answer


@pytest.mark.parametrize("is_keyed", [False, True], ids=["no key", "key"])
def test_clients(start: Callable[[str], Pod], key_file: str, is_keyed: bool) -> None:
    """Clients that may connect: all if the server has no key, else those with the key."""
    store = start(key_file if is_keyed else "")
    secret = store_secret(ServiceKey.load(key_file) if is_keyed else None)
    target = FuzzTarget(store, f"rank store, {'keyed' if is_keyed else 'open'}")
    with target.checking(lambda: check_answers(store, secret)):
        num_answered = send_raw(target, partial(connect_to, store, secret), partial(make, REQUESTS))
    assert num_answered
    assert "the rendezvous store dropped a client" in store.log.read_text()


def test_strangers(start: Callable[[str], Pod], key_file: str) -> None:
    """Clients without the key fail in the handshake."""
    store = start(key_file)
    secret = store_secret(ServiceKey.load(key_file))
    target = FuzzTarget(store, "rank store, strangers")
    with target.checking(lambda: check_answers(store, secret)):
        send_raw(target, partial(connect_tcp, store.address, PORT), partial(make, HANDSHAKE))
    assert "the rendezvous store dropped a client" in store.log.read_text()
