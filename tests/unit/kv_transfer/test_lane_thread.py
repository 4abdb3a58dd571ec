"""Who does the work of the lanes: their thread, or the user who waits; and that nothing is left undone between the two."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kv_processes import wait_for

from baton_kv_transfer.transports import lane_thread
from baton_kv_transfer.transports.lane_thread import AWAY_S, LaneThread

DEADLINE_S = 60.0


class Lane:
    """A lane that takes numbers from a pipe, and notes who took each."""

    def __init__(self) -> None:
        self.thread = LaneThread("test-lane")
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
        wait_for("the thread always works", lambda: self.wait(timeout_s, meanwhile), DEADLINE_S)

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
def lane() -> Iterator[Lane]:
    lane = Lane()
    yield lane
    lane.close()


def test_who_waits_does_the_work(lane: Lane) -> None:
    lane.wait_as_worker(meanwhile=lambda: lane.send(7))
    assert lane.taken == [(7, threading.get_ident())]


def test_the_thread_works_while_nobody_waits(lane: Lane) -> None:
    lane.wait_as_worker(0.0)
    lane.send(1)
    wait_for("nobody did the work", lambda: lane.taken, DEADLINE_S)
    assert lane.taken[0][1] != threading.get_ident()


def test_a_user_goes_on_until_there_is_news(lane: Lane) -> None:
    lane.wait_as_worker(meanwhile=lambda: lane.send(*range(20)))
    assert lane.taken == [(number, threading.get_ident()) for number in range(20)]


def test_the_thread_goes_on_where_a_user_leaves_for_news(lane: Lane) -> None:
    lane.act = lambda number: lane.thread.on_news()
    lane.wait_as_worker(meanwhile=lambda: lane.send(*range(100)))
    wait_for("numbers were left", lambda: len(lane.taken) == 100, DEADLINE_S)
    assert lane.numbers == list(range(100))
    assert lane.taken[0][1] == threading.get_ident()
    assert lane.taken[-1][1] != threading.get_ident()


def test_nobody_is_woken_for_what_its_only_user_finds_on_leaving(lane: Lane) -> None:
    woken: list[bool] = []
    lane.act = lambda number: woken.append(lane.thread.on_news())
    lane.wait_as_worker(meanwhile=lambda: lane.send(1))
    assert woken == [False]


def test_a_user_that_waits_beside_is_woken_for_what_the_other_finds_however_often_that_one_waits(
    lane: Lane,
) -> None:
    woken: list[bool] = []
    lane.act = lambda number: woken.append(lane.thread.on_news())
    with contextlib.ExitStack() as beside:

        def wait_beside() -> None:
            assert beside.enter_context(lane.thread.waiting()) is None
            lane.send(1)

        lane.wait_as_worker(meanwhile=wait_beside)
        lane.wait_as_worker(meanwhile=lambda: lane.send(2))
    assert woken == [True, True]
    lane.wait_as_worker(meanwhile=lambda: lane.send(3))
    assert woken == [True, True, False]


def test_users_are_woken_for_what_the_thread_or_anybody_else_finds(lane: Lane) -> None:
    woken: list[bool] = []
    lane.act = lambda number: woken.append(lane.thread.on_news())
    lane.wait_as_worker(0.0)
    lane.send(1)
    wait_for("nobody did the work", lambda: woken, DEADLINE_S)
    assert woken == [True]
    assert lane.thread.on_news()


def test_of_two_users_one_waits(lane: Lane) -> None:
    def wait_beside() -> bool:
        with lane.thread.waiting() as fd:
            return fd is None

    wait_for("the thread always works", lambda: lane.wait(0.0), DEADLINE_S)
    with lane.thread.waiting() as fd:
        assert fd is not None
        assert wait_beside()


def test_what_others_submit_wakes_the_user(lane: Lane) -> None:
    ran: list[int] = []
    lane.wait_as_worker(
        meanwhile=lambda: lane.thread.mailbox.submit(lambda: ran.append(threading.get_ident()))
    )
    assert ran == [threading.get_ident()]


def test_a_user_asks_of_the_thread_between_two_waits(lane: Lane) -> None:
    lane.wait_as_worker(2 * AWAY_S)
    assert lane.thread.mailbox.call(threading.get_ident) != threading.get_ident()


def test_what_is_due_is_done_while_a_user_waits(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_thread, "MAX_PARKED_S", 0.05)
    due = threading.Event()
    lane.act = lambda number: lane.thread.call_later(0.02, due.set)
    lane.wait_as_worker(meanwhile=lambda: lane.send(1))
    with lane.thread.waiting() as fd:
        assert fd is not None
        assert due.wait(DEADLINE_S), "nobody looked at the time"


def test_the_end_wakes_a_user_and_is_the_last_work(lane: Lane) -> None:
    closing = threading.Timer(0.05, lane.thread.close)
    closing.start()
    lane.wait_as_worker()
    assert lane.woken
    closing.join(DEADLINE_S)
    assert lane.ended
    assert not closing.is_alive()
    assert not lane.wait(), "a user waits for what will not come"


def test_the_end_wakes_a_user_also_where_the_last_turn_used_up_the_signal() -> None:
    lane = Lane()
    closing = threading.Thread(target=lane.thread.close)

    def close_and_take_the_signal() -> None:
        closing.start()
        wait_for("the lane did not end", lambda: lane.ended, DEADLINE_S)

    lane.wait_as_worker(meanwhile=close_and_take_the_signal)
    assert lane.woken
    closing.join(DEADLINE_S)
    lane.close()


def test_a_defect_in_a_users_turn_ends_the_lane_and_not_the_user(lane: Lane) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("a defect")

    lane.act = fail
    lane.wait_as_worker(meanwhile=lambda: lane.send(1))
    wait_for("the lane goes on after a defect", lambda: lane.ended, DEADLINE_S)


def test_a_lane_that_never_started_closes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    LaneThread("unused").close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_undone_however_user_and_thread_take_turns(lane: Lane, seed: int) -> None:
    """A sender waits for each number to be taken; a user waits and stays away in turns, for times around AWAY_S."""
    rng = random.Random(seed)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            lane.wait(rng.choice((0.0, AWAY_S, 0.01)))
            stop.wait(rng.choice((0.0, 0.0, AWAY_S / 2, 2 * AWAY_S)))

    user = threading.Thread(target=use)
    user.start()
    try:
        for index in range(60):
            lane.send(index % 256)
            wait_for(f"number {index} was left", lambda: len(lane.taken) == index + 1, DEADLINE_S)  # noqa: B023
            time.sleep(rng.choice((0.0, AWAY_S)))
    finally:
        stop.set()
        user.join(DEADLINE_S)
    assert not user.is_alive()
    assert lane.numbers == [index % 256 for index in range(60)]
