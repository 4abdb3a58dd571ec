"""Fixtures for consumers, producers and TCP transports that a test controls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.kv_transfer.consumer_rig import Rig, Worker
from support.kv_transfer.producer_rig import Producer
from support.kv_transfer.tcp_rig import TCPTransportHere


@pytest.fixture
def made() -> Iterator[Callable[[Any], Any]]:
    """Return a function that closes its argument at the end of the test."""
    with contextlib.ExitStack() as stack:

        def keep(what: Any) -> Any:
            for one in what if isinstance(what, list) else [what]:
                stack.callback(one.close)
            return what

        yield keep


@pytest.fixture
def rig(made: Callable[[Any], Any]) -> Rig:
    return made(Rig())


@pytest.fixture
def pushed(made: Callable[[Any], Any]) -> Rig:
    """A rig whose loads are pushed."""
    return made(Rig(push=True))


@pytest.fixture
def worker(made: Callable[[Any], Any]) -> Worker:
    return made(Worker())


@pytest.fixture
def make(made: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that makes producers and consumers. They are closed at the end."""
    return lambda kind, *args, **options: made(kind(*args, **options))


@pytest.fixture
def producer(make: Callable[..., Any]) -> Producer:
    return make(Producer)


@pytest.fixture
def tcp_transports() -> Iterator[Callable[..., TCPTransportHere]]:
    made: list[TCPTransportHere] = []

    def make(name: str, host: str = "127.0.0.1") -> TCPTransportHere:
        made.append(TCPTransportHere(name, host))
        return made[-1]

    yield make
    for transport in made:
        transport.thread.close()


@pytest.fixture
def tcp_pair(
    tcp_transports: Callable[..., TCPTransportHere],
) -> tuple[TCPTransportHere, TCPTransportHere]:
    """Return a transport that has added the owner as a peer, and the owner."""
    one, owner = tcp_transports("one"), tcp_transports("owner")
    one.transport.add_peer("owner", owner.transport.address)
    return one, owner
