"""A consumer under a test's control and a producer's worker for it (consumer_rig); a producer for scripted consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from consumer_rig import Rig, Worker
from scripted_consumer import Producer


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
