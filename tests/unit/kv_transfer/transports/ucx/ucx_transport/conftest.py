"""UCX transports of this process, their connections, and a raw UCX worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton_kv_transfer.transports.ucx import ucx_transport as transport_module
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from support.kv_transfer.agent_processes import Side, own_side
from support.kv_transfer.ucx_rig import Raw, UCXTransportHere


@pytest.fixture
def make(made: Callable[[Any], Any]) -> Callable[[str], UCXTransportHere]:
    def new(name: str) -> UCXTransportHere:
        transport = UCXTransportHere(name)
        made(transport.thread)
        return transport

    return new


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[UCXConnection]:
    """Return a list that gets every connection that a transport of this process opens."""
    opened: list[UCXConnection] = []

    class Recorded(UCXConnection):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    monkeypatch.setattr(transport_module, "UCXConnection", Recorded)
    return opened


@pytest.fixture
def pair(make: Callable[[str], UCXTransportHere]) -> tuple[UCXTransportHere, UCXTransportHere]:
    """Return a transport that has added the owner as a peer, and the owner."""
    one, owner = make("one"), make("owner")
    one.transport.add_peer("owner", owner.transport.address)
    return one, owner


@pytest.fixture
def raw(made: Callable[[Any], Any], pair: tuple[UCXTransportHere, UCXTransportHere]) -> Raw:
    """A UCX worker that is connected to the owner."""
    return made(Raw(pair[1]))


@pytest.fixture
def side() -> Iterator[Side]:
    yield from own_side("ucx")
