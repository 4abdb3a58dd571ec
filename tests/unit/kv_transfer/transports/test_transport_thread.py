"""Who does the work of the transports: their thread, or the user who waits; and that nothing is left undone between the two."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from baton_kv_transfer.transports import transport_thread
from baton_kv_transfer.transports.transport_thread import AWAY_S, TransportThread
from support.waiting import eventually

DEADLINE_S = 60.0


class Transport:
    """A transport that takes numbers from a pipe, and notes who took each."""

    def __init__(self) -> None:
        self.thread = TransportThread("test-transport")
        self.taken: list[tuple[int, int]] = []
        """(number, identity of the thread)."""
        self.ended = False
        self.woken = False
        """The last wait ended for a reason, not for its time."""
        self.act: Callable[[int], None] = lambda number: None
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        self.thread.watch(self._out, self._take)
        self.thread.start(self._end)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.taken]

    def send(self, *numbers: int) -> None:
        os.write(self._in, bytes(numbers))

    def wait(
        self, timeout_s: float = DEADLINE_S, meanwhile: Callable[[], None] = lambda: None
    ) -> bool:
        """As a user does; false if there was nothing to wait for here, as the thread works."""
        with self.thread.waiting() as fd:
            if fd is None:
                return False
            meanwhile()
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            self.woken = bool(poller.poll(timeout_s * 1000))
        return True

    def wait_as_worker(
        self, timeout_s: float = DEADLINE_S, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """As soon as that is possible."""
        eventually(lambda: self.wait(timeout_s, meanwhile), "the thread always works", DEADLINE_S)

    def close(self) -> None:
        self.thread.close()
        os.close(self._in)
        os.close(self._out)

    def _take(self) -> None:
        (number,) = os.read(self._out, 1)
        self.taken.append((number, threading.get_ident()))
        self.act(number)

    def _end(self) -> None:
        self.thread.unwatch(self._out)
        self.ended = True


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport()
    yield transport
    transport.close()


def test_who_waits_does_the_work(transport: Transport) -> None:
    transport.wait_as_worker(meanwhile=lambda: transport.send(7))
    assert transport.taken == [(7, threading.get_ident())]


def test_the_thread_works_while_nobody_waits(transport: Transport) -> None:
    transport.wait_as_worker(0.0)
    transport.send(1)
    eventually(lambda: transport.taken, "nobody did the work", DEADLINE_S)
    assert transport.taken[0][1] != threading.get_ident()


def test_a_user_goes_on_until_there_is_news(transport: Transport) -> None:
    transport.wait_as_worker(meanwhile=lambda: transport.send(*range(20)))
    assert transport.taken == [(number, threading.get_ident()) for number in range(20)]


def test_the_thread_goes_on_where_a_user_leaves_for_news(transport: Transport) -> None:
    transport.act = lambda number: transport.thread.on_news()
    transport.wait_as_worker(meanwhile=lambda: transport.send(*range(100)))
    eventually(lambda: len(transport.taken) == 100, "numbers were left", DEADLINE_S)
    assert transport.numbers == list(range(100))
    assert transport.taken[0][1] == threading.get_ident()
    assert transport.taken[-1][1] != threading.get_ident()


def test_nobody_is_woken_for_what_its_only_user_finds_on_leaving(transport: Transport) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_news())
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    assert woken == [False]


def test_a_user_that_waits_beside_is_woken_for_what_the_other_finds_however_often_that_one_waits(
    transport: Transport,
) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_news())
    with contextlib.ExitStack() as beside:

        def wait_beside() -> None:
            assert beside.enter_context(transport.thread.waiting()) is None
            transport.send(1)

        transport.wait_as_worker(meanwhile=wait_beside)
        transport.wait_as_worker(meanwhile=lambda: transport.send(2))
    assert woken == [True, True]
    transport.wait_as_worker(meanwhile=lambda: transport.send(3))
    assert woken == [True, True, False]


def test_users_are_woken_for_what_the_thread_or_anybody_else_finds(transport: Transport) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_news())
    transport.wait_as_worker(0.0)
    transport.send(1)
    eventually(lambda: woken, "nobody did the work", DEADLINE_S)
    assert woken == [True]
    assert transport.thread.on_news()


def test_of_two_users_one_waits(transport: Transport) -> None:
    def wait_beside() -> bool:
        with transport.thread.waiting() as fd:
            return fd is None

    eventually(lambda: transport.wait(0.0), "the thread always works", DEADLINE_S)
    with transport.thread.waiting() as fd:
        assert fd is not None
        assert wait_beside()


def test_what_others_submit_wakes_the_user(transport: Transport) -> None:
    ran: list[int] = []
    transport.wait_as_worker(
        meanwhile=lambda: transport.thread.mailbox.submit(lambda: ran.append(threading.get_ident()))
    )
    assert ran == [threading.get_ident()]


def test_a_user_asks_of_the_thread_between_two_waits(transport: Transport) -> None:
    transport.wait_as_worker(2 * AWAY_S)
    assert transport.thread.mailbox.call(threading.get_ident) != threading.get_ident()


def test_what_is_due_is_done_while_a_user_waits(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_thread, "MAX_PARKED_S", 0.05)
    due = threading.Event()
    transport.act = lambda number: transport.thread.call_later(0.02, due.set)
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    with transport.thread.waiting() as fd:
        assert fd is not None
        assert due.wait(DEADLINE_S), "nobody looked at the time"


def test_the_end_wakes_a_user_and_is_the_last_work(transport: Transport) -> None:
    closing = threading.Timer(0.05, transport.thread.close)
    closing.start()
    transport.wait_as_worker()
    assert transport.woken
    closing.join(DEADLINE_S)
    assert transport.ended
    assert not closing.is_alive()
    assert not transport.wait(), "a user waits for what will not come"


def test_the_end_wakes_a_user_also_where_the_last_turn_used_up_the_signal() -> None:
    transport = Transport()
    closing = threading.Thread(target=transport.thread.close)

    def close_and_take_the_signal() -> None:
        closing.start()
        eventually(lambda: transport.ended, "the transport did not end", DEADLINE_S)

    transport.wait_as_worker(meanwhile=close_and_take_the_signal)
    assert transport.woken
    closing.join(DEADLINE_S)
    transport.close()


def test_a_defect_in_a_users_turn_ends_the_transport_and_not_the_user(transport: Transport) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("a defect")

    transport.act = fail
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    eventually(lambda: transport.ended, "the transport goes on after a defect", DEADLINE_S)


def test_a_transport_that_never_started_closes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    TransportThread("unused").close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_undone_however_user_and_thread_take_turns(
    transport: Transport, seed: int
) -> None:
    """A sender waits for each number to be taken; a user waits and stays away in turns, for times around AWAY_S."""
    rng = random.Random(seed)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            transport.wait(rng.choice((0.0, AWAY_S, 0.01)))
            stop.wait(rng.choice((0.0, 0.0, AWAY_S / 2, 2 * AWAY_S)))

    user = threading.Thread(target=use)
    user.start()
    try:
        for index in range(60):
            transport.send(index % 256)
            expected = index + 1
            eventually(
                lambda expected=expected: len(transport.taken) == expected,
                f"number {index} was left",
                DEADLINE_S,
            )
            time.sleep(rng.choice((0.0, AWAY_S)))
    finally:
        stop.set()
        user.join(DEADLINE_S)
    assert not user.is_alive()
    assert transport.numbers == [index % 256 for index in range(60)]
