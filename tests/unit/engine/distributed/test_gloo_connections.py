"""Untrusted connections to gloo: closed when the group has formed, and not accepted afterwards."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator

import pytest
import torch

from baton_engine.distributed import gloo_connections, process_group
from baton_engine.distributed.gloo_connections import connections_among, reject_non_members
from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.process_group import create_group
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store

HOST = "127.0.0.1"
CPU = torch.device("cpu")
WAIT_S = 60.0
#: A separate process, because connections of this process count as those of members.
CLIENT = """
import socket, sys
connections = []
for line in sys.stdin:
    host, port, data = (line.split() + [""])[:3]
    if host == "close":
        closed = 0
        for connection in connections:
            connection.settimeout(20)
            try:
                while connection.recv(2**16):
                    pass
                closed += 1
            except ConnectionResetError:
                closed += 1
            except TimeoutError:
                pass
        print(closed, "of", len(connections), flush=True)
    else:
        connections.append(socket.create_connection((host, int(port))))
        connections[-1].sendall(bytes.fromhex(data))
        print("connected", flush=True)
"""


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with contextlib.closing(open_store(HOST)) as store:
        yield store


class Listening:
    """Records the addresses of gloo devices, and connects to each before any member does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[gloo_connections.Address] = []
        #: The data to send. Each is sent over one connection to every device.
        self.sequences: list[bytes] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lock = threading.Lock()
        original = process_group.open_device

        def open_device(
            host: str,
        ) -> tuple[object, gloo_connections.Address, Collection[int]]:
            device, address, older = original(host)
            with self._lock:
                self.addresses.append(address)
                for data in self.sequences:
                    assert self._ask(f"{address[0]} {address[1]} {data.hex()}") == "connected"
            return device, address, older

        monkeypatch.setattr(process_group, "open_device", open_device)

    def assert_closed(self) -> None:
        closed, _, total = self._ask("close 0").split()
        assert closed == total

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        return self._process.stdout.readline().strip()


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    listening = Listening(monkeypatch)
    yield listening
    listening.close()


def form(store: StoreServer, size: int) -> list[Group | Exception]:
    """Return the group of every rank, or the error that it raised."""
    results: list[Group | Exception] = [RuntimeError("the rank did not end")] * size

    def join(rank: int) -> None:
        try:
            results[rank] = create_group(
                "test", rank, size, connect_store(store.address, WAIT_S), 1, CPU, 10.0
            )
        except (TimeoutError, GroupBrokenError, RuntimeError) as error:
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def groups_of(results: list[Group | Exception]) -> list[Group]:
    groups = []
    for result in results:
        assert not isinstance(result, Exception), result
        groups.append(result)
    return groups


def exchange(groups: list[Group]) -> None:
    tensors = [torch.full((1000,), float(rank)) for rank in range(len(groups))]
    threads = [
        threading.Thread(target=group.all_reduce, args=(tensor,))
        for group, tensor in zip(groups, tensors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all((tensor == sum(range(len(groups)))).all() for tensor in tensors)


def close(groups: list[Group]) -> None:
    for group in groups:
        group.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3])
def test_untrusted_connections_are_closed_when_the_group_has_formed(
    size: int, store: StoreServer, listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listening.sequences = [b"", b"x", b"\xff" * 8]
    groups = groups_of(form(store, size))
    try:
        listening.assert_closed()
        exchange(groups)
        # Other processes of this machine may also connect.
        numbers = re.findall(r"closed (\d+) connections to gloo", caplog.text)
        assert len(numbers) == size
        assert all(int(number) >= 3 for number in numbers)
    finally:
        close(groups)


def test_a_formed_group_accepts_no_connections(store: StoreServer, listening: Listening) -> None:
    groups = groups_of(form(store, 2))
    try:
        before = num_descriptors()
        for address in listening.addresses:
            for _ in range(3):
                with socket.socket() as connection:
                    connection.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        connection.connect(address)
        assert num_descriptors() == before
        exchange(groups)
    finally:
        close(groups)


def test_a_connection_that_takes_the_place_of_a_member_is_closed(
    store: StoreServer, listening: Listening
) -> None:
    """The connection sends gloo's connection numbers. The group can fail, but not form with it."""
    listening.sequences = [number.to_bytes(8, "little") for number in range(8)]
    results = form(store, 2)
    groups = [each for each in results if not isinstance(each, Exception)]
    try:
        if len(groups) == 2:
            exchange(groups)
    finally:
        close(groups)
    del groups, results
    gc.collect()
    listening.assert_closed()
    listening.sequences = []
    with contextlib.closing(open_store(HOST)) as another:
        groups = groups_of(form(another, 2))
        exchange(groups)
        close(groups)


def test_sockets_that_are_older_than_the_device_are_skipped() -> None:
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server((HOST, 0)))
        address = listener.getsockname()

        def connect() -> set[int]:
            sockets = [closing.enter_context(socket.create_connection(address))]
            sockets.append(closing.enter_context(listener.accept()[0]))
            return {os.fstat(each.fileno()).st_ino for each in sockets}

        before = connect()
        _, _, older = gloo_connections.open_device(HOST)
        after = connect()
        assert {each.inode for each in connections_among([address])} == before | after
        assert {each.inode for each in connections_among([address], older)} == after


@pytest.mark.parametrize("is_translated", [False, True])
def test_one_connection_of_a_stranger_does_not_count_as_the_one_member(is_translated: bool) -> None:
    """The member's connection may still be in the queue of the listener."""
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server((HOST, 0)))
        own = listener.getsockname()
        stranger = subprocess.Popen(
            [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        closing.callback(stranger.communicate)
        closing.callback(stranger.kill)
        stranger.stdin.write(f"{own[0]} {own[1]}\n")
        stranger.stdin.flush()
        connection = closing.enter_context(listener.accept()[0])
        closing.enter_context(connection.dup())  # as of another thread that lists sockets
        member = (HOST, 1)
        num_closed = reject_non_members(own, {member}, is_translated=is_translated)
        assert num_closed == (0 if is_translated else 1)
        if not is_translated:
            connection.settimeout(WAIT_S)
            assert connection.recv(1) == b""


def test_members_behind_address_translation_are_not_closed(
    store: StoreServer, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = process_group.connected_from
    monkeypatch.setattr(
        process_group,
        "connected_from",
        lambda connections, members: [
            (("10.9.9.9", port), target) for (_, port), target in original(connections, members)
        ],
    )
    monkeypatch.setenv(process_group.TRANSLATED_ADDRESSES, "1")
    groups = groups_of(form(store, 3))
    exchange(groups)
    close(groups)
    assert len(listening.addresses) == 3
