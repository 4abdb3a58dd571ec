"""Clients take turns in the threads that compile grammars."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from baton_engine.grammar.fair_thread_pool import FairPool

DEADLINE_S = 30.0


class Busy:
    """A pool whose only thread is busy until `released` is set."""

    def __init__(self) -> None:
        self.pool = FairPool(1, "test")
        self.released = threading.Event()
        self.order: list[str] = []
        self._running = self.pool.submit("", lambda: self.released.wait(DEADLINE_S))

    def submit(self, client: str, name: str) -> Future[None]:
        return self.pool.submit(client, lambda: self.order.append(name))


def test_a_client_with_many_calls_delays_another_one_by_one_call() -> None:
    busy = Busy()
    calls = [busy.submit("a", f"a{number}") for number in range(3)]
    calls += [busy.submit("b", f"b{number}") for number in range(2)]
    busy.released.set()
    for call in calls:
        call.result(DEADLINE_S)
    assert busy.order == ["a0", "b0", "a1", "b1", "a2"]


def test_a_cancelled_call_does_not_run() -> None:
    busy = Busy()
    first, second = busy.submit("a", "a0"), busy.submit("a", "a1")
    assert first.cancel()
    busy.released.set()
    second.result(DEADLINE_S)
    assert busy.order == ["a1"]


def test_an_error_of_a_call_is_the_error_of_its_future() -> None:
    def fail() -> None:
        raise ValueError("bad")

    pool = FairPool(1, "test")
    with pytest.raises(ValueError, match="bad"):
        pool.submit("a", fail).result(DEADLINE_S)
    pool.submit("a", lambda: None).result(DEADLINE_S)


def test_a_shutdown_cancels_waiting_calls() -> None:
    busy = Busy()
    call = busy.submit("a", "a0")
    busy.pool.shutdown()
    assert call.cancelled()
    busy.released.set()
    assert not busy.order
