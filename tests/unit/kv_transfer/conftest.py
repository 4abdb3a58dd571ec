"""A consumer under a test's control and a producer's worker for it (consumer_rig); a producer for scripted consumers; TCP lanes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from consumer_rig import Rig, Worker
from scripted_consumer import Producer
from tcp_lane_rig import LaneHere


@pytest.fixture
def made() -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given at the end of the test."""
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
    """One whose loads are pushed."""
    return made(Rig(push=True))


@pytest.fixture
def worker(made: Callable[[Any], Any]) -> Worker:
    return made(Worker())


@pytest.fixture
def make(made: Callable[[Any], Any]) -> Callable[..., Any]:
    """Makes producers and consumers; all are closed at the end."""
    return lambda kind, *args, **options: made(kind(*args, **options))


@pytest.fixture
def producer(make: Callable[..., Any]) -> Producer:
    return make(Producer)


@pytest.fixture
def tcp_lanes() -> Iterator[Callable[..., LaneHere]]:
    made: list[LaneHere] = []

    def make(name: str, host: str = "127.0.0.1") -> LaneHere:
        made.append(LaneHere(name, host))
        return made[-1]

    yield make
    for lane in made:
        lane.thread.close()


@pytest.fixture
def tcp_pair(tcp_lanes: Callable[..., LaneHere]) -> tuple[LaneHere, LaneHere]:
    """(one that knows the owner, the owner)."""
    one, owner = tcp_lanes("one"), tcp_lanes("owner")
    one.lane.add_peer("owner", owner.lane.address)
    return one, owner
