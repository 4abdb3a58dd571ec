"""The ranks' store: behaviour of torch's stores, concurrent clients, deaths and bad messages."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError

from baton_engine.distributed.process_group import create_group, generation_store, is_before
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.distributed.store.wire import LENGTH, MAX_REQUEST_BYTES, StoreAddress
from pocketkube.ports import free_ports
from support.engine import ranks
from support.waiting import eventually, suspend

WAIT_S = 60.0
AT_ONCE_S = 20.0
HOST = "127.0.0.1"
LOOKUPS = Path(ranks.__file__).with_name("name_lookups.py")


keys = st.sampled_from(["a", "b", "a key"])
values = st.sampled_from(["", "x", "\u00fc \0"])
calls = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("append"), keys, values),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("add"), st.sampled_from(["n", "m"]), st.integers(-(2**40), 2**40)),
    st.tuples(st.just("check"), st.lists(keys)),
    st.tuples(st.just("delete_key"), st.one_of(keys, st.just("n"))),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(values, values)),
)


def test_forget_deletes_outdated_generations(server: StoreServer, store: Store) -> None:
    for number in (1, 2, 10):
        generation_store(store, number, "n").set("key", "x" * 100)
    generation_store(store, 2).set("key", "x")
    store.set("generation-none", "x")
    before = server._values._nbytes
    server.forget(is_before(10))
    eventually(lambda: store.num_keys() == 2, timeout_s=WAIT_S, what="outdated keys are deleted")
    assert generation_store(store, 10, "n").get("key") == b"x" * 100
    assert store.check(["generation-none"])
    assert (
        server._values._nbytes
        == before - 2 * (len("generation-1-n/key") + 100) - len("generation-2/key") - 1
    )
    server.close()
    server.forget(is_before(10))


@pytest.mark.parametrize("called_from", ["Python", "C++"])
def test_calls_return_the_results_of_torchs_hash_store(called_from: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(calls, max_size=12))
    def compare(sequence: list[tuple[Any, ...]]) -> None:
        with contextlib.closing(open_store(HOST)) as server:
            client, torchs = connect_store(server.address, WAIT_S), HashStore()
            ours = client if called_from == "Python" else PrefixStore("part", client)
            for name, *arguments in sequence:
                assert getattr(ours, name)(*arguments) == getattr(torchs, name)(*arguments), name
            there = [key for key in ("a", "b", "a key", "n", "m") if torchs.check([key])]
            ours.wait(there)
            assert (
                ours.multi_get(there) == torchs.multi_get(there) == [ours.get(key) for key in there]
            )

    compare()


def test_waiting_clients_get_their_answer_with_the_last_key_and_block_no_others(
    store: Store,
) -> None:
    parts = [store, PrefixStore("part", store)]  # both use one connection
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(part.multi_get, ["one", "two"]) for part in parts * 4]
        for part in parts:
            part.set("one", "1")
        assert store.check(["one"])
        assert not any(answer.done() for answer in answers)
        for part in parts:
            part.set("two", "2")
        assert [answer.result(AT_ONCE_S) for answer in answers] == [[b"1", b"2"]] * 8


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.add("key", 1),
        lambda store: store.append("key", "1"),
        lambda store: store.compare_set("key", "", "1"),
        lambda store: store.multi_set(["key"], ["1"]),
    ],
)
def test_every_call_that_sets_a_key_ends_waits_for_it(call: Any, store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(store.get, "key")
        call(store)
        assert answer.result(AT_ONCE_S) == b"1"


def test_the_late_answer_to_a_call_that_timed_out_is_dropped(store: Store) -> None:
    store.set_timeout(timedelta(seconds=0.2))
    started = time.monotonic()
    with pytest.raises(
        DistStoreError, match=r"did not answer Get\(keys=\['late'\]\) within 0\.2 s"
    ):
        store.get("late")
    assert 0.2 <= time.monotonic() - started < AT_ONCE_S
    store.set_timeout(timedelta(seconds=WAIT_S))
    with pytest.raises(DistStoreError, match=r"within 0\.3 s"):
        store.wait(["late"], timedelta(seconds=0.3))
    with pytest.raises(DistStoreError, match=r"within 0\.3 s"):
        PrefixStore("part", store).wait(["late"], timedelta(seconds=0.3))
    store.set("late", "too late")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_add_to_a_value_that_is_no_number_is_refused(store: Store) -> None:
    store.set("key", "text")
    with pytest.raises(DistStoreError, match=r"refused Add\(key='key', amount=1\)"):
        store.add("key", 1)
    assert store.get("key") == b"text"


def test_concurrent_clients_do_not_lose_updates(server: StoreServer) -> None:
    stores = [connect_store(server.address, WAIT_S) for _ in range(2)]

    def count(number: int) -> bytes:
        for _ in range(100):
            stores[number % 2].add("sum", 1)
        return stores[number % 2].compare_set("winner", "", str(number))

    with ThreadPoolExecutor(8) as pool:
        winners = set(pool.map(count, range(8)))
    assert len(winners) == 1
    assert [store.get("sum") for store in stores] == [b"800"] * 2


def test_answers_can_exceed_the_buffer_of_a_socket(store: Store) -> None:
    # Eight values of 1 MiB less 100 bytes.
    large = {f"large {number}": os.urandom(2**19 - 50).hex() for number in range(8)}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(store.multi_get, [*large, "last"]) for _ in range(4)]
        for key, value in large.items():
            store.set(key, value)
        store.set("last", "")
        values = [value.encode() for value in large.values()]
        assert all(answer.result(WAIT_S) == [*values, b""] for answer in answers)
    with pytest.raises(ValueError, match="accepts messages of at most"):
        store.set("key", "x" * MAX_REQUEST_BYTES)
    assert store.num_keys() == 9


def test_the_end_of_a_store_fails_the_calls_of_its_clients(
    server: StoreServer, store: Store
) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(store.get, f"key {i}") for i in range(3)]
        server.close()
        server.close()
        for answer in answers:
            with pytest.raises(
                DistNetworkError,
                match=f"the rendezvous store at {HOST}:{server.address.port} is gone",
            ):
                answer.result(AT_ONCE_S)
    started = time.monotonic()
    with pytest.raises(DistNetworkError):
        store.set("key", "value")
    assert time.monotonic() - started < AT_ONCE_S
    with pytest.raises(
        TimeoutError,
        match=f"no rendezvous store responded at {HOST}:{server.address.port} within 0.2 s",
    ):
        connect_store(server.address, 0.2)


@contextlib.contextmanager
def store_process() -> Iterator[tuple[subprocess.Popen[str], StoreAddress]]:
    program = (
        "import sys; from baton_engine.distributed.store.store_server import open_store; "
        "assert 'torch' not in sys.modules; "
        f"print(open_store({HOST!r}).address.port, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, StoreAddress(HOST, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_killed_store_fails_calls_at_once_and_a_frozen_one_at_their_timeout() -> None:
    with store_process() as (process, address):
        store = connect_store(address, WAIT_S)
        store.set("key", "value")
        suspend(process.pid)
        with pytest.raises(DistStoreError, match=r"within 0\.3 s"):
            store.wait(["key"], timedelta(seconds=0.3))
        process.send_signal(signal.SIGCONT)
        assert store.get("key") == b"value"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(store.get, "never")
            process.kill()
            with pytest.raises(DistNetworkError):
                answer.result(AT_ONCE_S)


def test_joining_a_group_fails_at_once_when_the_store_dies() -> None:
    with store_process() as (process, address), ThreadPoolExecutor(1) as pool:
        store = connect_store(address, WAIT_S)
        joining = pool.submit(create_group, "test", 0, 2, store, 1, torch.device("cpu"), WAIT_S)
        store.wait(["generation-1/test/listens-0"])
        process.kill()
        with pytest.raises(TimeoutError, match="group test of generation 1: rank 0 waited"):
            joining.result(AT_ONCE_S)


def test_a_client_waits_for_its_store_to_open() -> None:
    [port] = free_ports(1)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_store, StoreAddress("localhost", port), WAIT_S)
        with contextlib.closing(open_store("localhost", port=port)):
            assert connecting.result(WAIT_S).num_keys() == 0


def test_a_store_listens_on_one_address_only(server: StoreServer) -> None:
    with pytest.raises(TimeoutError, match=r"no rendezvous store responded at 127\.0\.0\.2"):
        connect_store(StoreAddress("127.0.0.2", server.address.port), 0.2)


DEEP = b"\x82\xa4type\xa9CountKeys\xa2zz" + b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(MAX_REQUEST_BYTES + 1),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        b"\0\0",
        LENGTH.pack(len(DEEP)) + DEEP,
    ],
)
def test_a_client_with_invalid_messages_is_dropped_and_others_are_served(
    message: bytes, server: StoreServer, store: Store
) -> None:
    with ThreadPoolExecutor(1) as pool, socket.create_connection(server.address) as connection:
        answer = pool.submit(store.get, "key")
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(AT_ONCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        store.set("key", "value")
        assert answer.result(AT_ONCE_S) == b"value"


def test_a_closed_store_leaves_no_descriptors_and_threads() -> None:
    def open_resources() -> tuple[set[str], int]:
        return set(os.listdir("/proc/self/fd")), threading.active_count()

    def nothing_new() -> bool:
        descriptors, threads = open_resources()
        return descriptors <= before[0] and threads <= before[1]

    before = open_resources()  # resources of earlier tests can still end
    with contextlib.closing(open_store(HOST)) as server:
        store = connect_store(server.address, WAIT_S)
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(store.get, "key") for _ in range(3)]
            store.set("key", "value")
            assert [answer.result(WAIT_S) for answer in answers] == [b"value"] * 3
        del store, answers, pool
    eventually(nothing_new, timeout_s=WAIT_S, what="the end of all descriptors and threads")


@pytest.mark.skipif(
    platform.machine() != "x86_64",
    reason="patches a function of the C library with x86-64 machine code",
)
@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_forming_a_group_looks_up_no_host_names(kind: str) -> None:
    """Torch's store looks up names, which shows that the test can fail."""
    output = subprocess.run(
        [sys.executable, str(LOOKUPS), kind],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    ).stdout
    assert output.startswith("formed, lookups: ")
    assert (int(output.rpartition(" ")[2]) > 0) == (kind == "torch's")
