"""A consumer under a test's control, and a producer's worker for it; see consumer_rig."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from consumer_rig import Rig, Worker


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
