"""Clients take turns in the threads of a pool."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from functools import partial

import pytest

from baton_protocol.process.fair_thread_pool import FairThreadPool

DEADLINE_S = 30.0


class Busy:
    """A pool whose only thread is busy until `released` is set."""

    def __init__(self) -> None:
        self.pool = FairThreadPool(1, "test")
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


class Arguments:
    """Stands for the memory that a call refers to."""


def test_a_cancelled_call_is_dropped_while_the_threads_are_busy() -> None:
    busy, arguments = Busy(), Arguments()
    is_alive = weakref.ref(arguments)
    future = busy.pool.submit("a", partial(id, arguments))
    del arguments
    assert is_alive()
    future.cancel()
    assert not is_alive()
    busy.released.set()
    assert busy.pool.submit("a", lambda: "next").result(DEADLINE_S) == "next"


def test_a_failed_call_is_dropped() -> None:
    pool, arguments = FairThreadPool(1, "test"), Arguments()
    is_alive = weakref.ref(arguments)
    failed = pool.submit("a", partial(int, arguments))  # type: ignore[call-overload]
    del arguments
    assert isinstance(failed.exception(DEADLINE_S), TypeError)
    pool.submit("a", lambda: None).result(DEADLINE_S)
    assert not is_alive()


def test_an_error_of_a_call_is_the_error_of_its_future() -> None:
    def fail() -> None:
        raise ValueError("bad")

    pool = FairThreadPool(1, "test")
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
