"""Agents of each kind, and the owners of memory that they connect to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.kv_transfer import agent_processes
from support.kv_transfer.agent_processes import (
    KINDS,
    Owner,
    OwnerProcess,
    Side,
    new_owner,
)


@pytest.fixture(scope="module")
def owners() -> Iterator[Callable[[str], Owner]]:
    """Return a function that returns the owner of this kind. Living owners are reused."""
    kept: dict[str, Owner] = {}

    def get(kind: str) -> Owner:
        owner = kept.get(kind)
        if owner is None or (isinstance(owner, OwnerProcess) and not owner.process.is_alive()):
            owner = kept[kind] = new_owner(kind)
        owner.call("refill")
        owner.call("new_notifs")
        return owner

    yield get
    for owner in kept.values():
        owner.stop()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nixl":
        monkeypatch.setattr("baton_kv_transfer.agent.nixl_agent.REMOVE_GRACE_S", 0.2)
    return request.param


@pytest.fixture
def side(kind: str, owners: Callable[[str], Owner]) -> Iterator[Side]:
    side = Side(kind, owners(kind))
    yield side
    side.agent.close()


@pytest.fixture
def own_side(kind: str) -> Iterator[Side]:
    yield from agent_processes.own_side(kind)
