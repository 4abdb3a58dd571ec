"""The transport thread: a waiting user does the transport's work instead of the thread."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_kv_transfer.transports import progress_handoff, transport_thread
from baton_kv_transfer.transports.progress_handoff import AWAY_NS
from baton_kv_transfer.transports.transport_thread import TransportThread
from support.waiting import eventually

DEADLINE_S = 60.0
AWAY_S = AWAY_NS / 1e9


class Transport:
    """A transport that takes numbers from a pipe and records the thread that took each."""

    def __init__(self) -> None:
        self.thread = TransportThread("test-transport")
        #: (number, identity of the thread).
        self.taken: list[tuple[int, int]] = []
        self.ended = False
        #: The last wait ended before its timeout.
        self.woken = False
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
        """Wait as a user. Return false if the thread is working."""
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
        """Wait as a user as soon as the thread is idle."""
        eventually(lambda: self.wait(timeout_s, meanwhile), "an idle thread", DEADLINE_S)

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


def test_a_waiting_user_does_the_work(transport: Transport) -> None:
    transport.wait_as_worker(meanwhile=lambda: transport.send(7))
    assert transport.taken == [(7, threading.get_ident())]


def test_the_thread_works_while_no_user_waits(transport: Transport) -> None:
    transport.wait_as_worker(0.0)
    transport.send(1)
    eventually(lambda: transport.taken, "the work by the thread", DEADLINE_S)
    assert transport.taken[0][1] != threading.get_ident()


def test_a_user_works_until_there_is_an_event(transport: Transport) -> None:
    transport.wait_as_worker(meanwhile=lambda: transport.send(*range(20)))
    assert transport.taken == [(number, threading.get_ident()) for number in range(20)]


def test_the_thread_continues_after_a_user_left_for_an_event(transport: Transport) -> None:
    transport.act = lambda number: transport.thread.on_event()
    transport.wait_as_worker(meanwhile=lambda: transport.send(*range(100)))
    eventually(lambda: len(transport.taken) == 100, "all numbers taken", DEADLINE_S)
    assert transport.numbers == list(range(100))
    assert transport.taken[0][1] == threading.get_ident()
    assert transport.taken[-1][1] != threading.get_ident()


def test_the_only_user_is_not_woken_for_its_own_event(transport: Transport) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_event())
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    assert woken == [False]


def test_a_second_waiting_user_is_woken_for_an_event_of_the_first(
    transport: Transport,
) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_event())
    with contextlib.ExitStack() as beside:

        def wait_beside() -> None:
            assert beside.enter_context(transport.thread.waiting()) is None
            transport.send(1)

        transport.wait_as_worker(meanwhile=wait_beside)
        transport.wait_as_worker(meanwhile=lambda: transport.send(2))
    assert woken == [True, True]
    transport.wait_as_worker(meanwhile=lambda: transport.send(3))
    assert woken == [True, True, False]


def test_users_are_woken_for_an_event_of_the_thread(transport: Transport) -> None:
    woken: list[bool] = []
    transport.act = lambda number: woken.append(transport.thread.on_event())
    transport.wait_as_worker(0.0)
    transport.send(1)
    eventually(lambda: woken, "the work by the thread", DEADLINE_S)
    assert woken == [True]
    assert transport.thread.on_event()


def test_the_thread_sleeps_while_a_user_waits_again_in_time(transport: Transport) -> None:
    transport.wait_as_worker(0.0)
    thread = next(one for one in threading.enumerate() if one.name == "test-transport")
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def count_sleeps() -> int:
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.M)[0])

    before = count_sleeps()
    for _ in range(50):
        transport.wait(2 * AWAY_S)
    assert count_sleeps() - before < 25, "the thread was woken for most of the waits"


def test_only_one_of_two_users_does_the_work(transport: Transport) -> None:
    def wait_beside() -> bool:
        with transport.thread.waiting() as fd:
            return fd is None

    eventually(lambda: transport.wait(0.0), "an idle thread", DEADLINE_S)
    with transport.thread.waiting() as fd:
        assert fd is not None
        assert wait_beside()


def test_a_submitted_call_wakes_the_user(transport: Transport) -> None:
    ran: list[int] = []
    transport.wait_as_worker(
        meanwhile=lambda: transport.thread.commands.submit(
            lambda: ran.append(threading.get_ident())
        )
    )
    assert ran == [threading.get_ident()]


def test_calls_between_two_waits_run_on_the_thread(transport: Transport) -> None:
    transport.wait_as_worker(2 * AWAY_S)
    assert transport.thread.commands.call(threading.get_ident) != threading.get_ident()


def test_timers_run_while_a_user_waits(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_thread, "MAX_PARKED_S", 0.05)
    due = threading.Event()
    transport.act = lambda number: transport.thread.call_later(0.02, due.set)
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    with transport.thread.waiting() as fd:
        assert fd is not None
        assert due.wait(DEADLINE_S), "the timer did not run"


def test_the_end_wakes_a_user_and_runs_last(transport: Transport) -> None:
    closing = threading.Timer(0.05, transport.thread.close)
    closing.start()
    transport.wait_as_worker()
    assert transport.woken
    closing.join(DEADLINE_S)
    assert transport.ended
    assert not closing.is_alive()
    assert not transport.wait(), "a user waits after the end"


def test_the_end_wakes_a_user_after_the_signal_was_consumed() -> None:
    transport = Transport()
    closing = threading.Thread(target=transport.thread.close)

    def close_and_consume_the_signal() -> None:
        closing.start()
        eventually(lambda: transport.ended, "the end of the transport", DEADLINE_S)

    transport.wait_as_worker(meanwhile=close_and_consume_the_signal)
    assert transport.woken
    closing.join(DEADLINE_S)
    transport.close()


def test_a_defect_during_a_users_work_ends_the_transport_only(transport: Transport) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("a defect")

    transport.act = fail
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    eventually(lambda: transport.ended, "the end of the transport", DEADLINE_S)


def test_after_a_defect_while_the_last_user_is_away_no_user_gets_the_work(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_handoff, "AWAY_NS", 60 * 10**9)
    monkeypatch.setattr(transport_thread, "MAX_PARKED_S", 0.05)

    def fail() -> None:
        raise RuntimeError("a defect")

    transport.act = lambda number: transport.thread.call_later(0.02, fail)
    transport.wait_as_worker(meanwhile=lambda: transport.send(1))
    eventually(lambda: transport.ended, "the end of the transport", DEADLINE_S)
    assert not transport.wait(), "a user waits after the end"


def test_a_thread_that_does_not_end_is_logged(
    transport: Transport, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_thread, "CLOSE_TIMEOUT_S", 0.05)
    stuck, free = threading.Event(), threading.Event()

    def block() -> None:
        stuck.set()
        free.wait(10)

    transport.thread.commands.submit(block)
    assert stuck.wait(5), "the thread did not run the command"
    transport.thread.close()
    free.set()
    eventually(lambda: transport.ended, "the end of the thread", DEADLINE_S)
    assert "did not end within" in caplog.text


def test_a_transport_that_never_started_can_be_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    TransportThread("unused").close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seed", range(5))
def test_no_work_is_lost_when_user_and_thread_alternate(transport: Transport, seed: int) -> None:
    """A sender waits for each number. A user alternates between waiting and being away."""
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
                f"number {index} taken",
                DEADLINE_S,
            )
            time.sleep(rng.choice((0.0, AWAY_S)))
    finally:
        stop.set()
        user.join(DEADLINE_S)
    assert not user.is_alive()
    assert transport.numbers == [index % 256 for index in range(60)]
