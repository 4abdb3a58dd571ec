"""The hand-off of the transports' work: calls in any order, by the thread and by users."""

from __future__ import annotations

import enum
import select
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv_transfer.transports import progress_handoff
from baton_kv_transfer.transports.progress_handoff import Holder, ProgressHandoff


class FakeTimer:
    """A timer that expires when the test sets `has_expired`."""

    def __init__(self) -> None:
        self.is_set = self.has_expired = False

    def set(self, delay_ns: int) -> None:
        self.is_set, self.has_expired = delay_ns > 0, False

    def wait(self, timeout_s: float) -> bool:
        return self.has_expired

    def close(self) -> None:
        self.is_set = False


class Thread(enum.Enum):
    """What the thread does, and what it waits for at that time."""

    WORKS = enum.auto()
    #: It waits for events, and for a user that takes the work.
    POLLS = enum.auto()
    #: It waits for the timer only.
    PARKED = enum.auto()


class ProgressHandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        with mock.patch.object(progress_handoff, "TimerFD", FakeTimer):
            self.handoff = ProgressHandoff()
        assert isinstance(self.handoff.reclaim_timer, FakeTimer)
        self.timer = self.handoff.reclaim_timer
        self.thread = Thread.WORKS
        self.holder = Holder.THREAD
        #: Waiting users with the work, and without it.
        self.workers = self.bystanders = 0
        self.is_closed = False

    def teardown(self) -> None:
        self.handoff.close_descriptors()

    @precondition(lambda self: self.thread is Thread.WORKS and not self.is_closed)
    @rule()
    def the_thread_has_nothing_left_to_do(self) -> None:
        self.handoff.rest()
        self.thread, self.holder = Thread.POLLS, Holder.NONE

    @precondition(lambda self: self.thread is not Thread.WORKS)
    @rule()
    def the_thread_wakes_up(self) -> None:
        if self.timer.has_expired:
            self.holder = Holder.THREAD
        may_work = self.holder is Holder.THREAD or self.is_closed
        assert self.handoff.resume() == may_work
        self.thread = Thread.WORKS if may_work else Thread.PARKED

    @precondition(lambda self: self.timer.is_set)
    @rule()
    def the_timer_expires(self) -> None:
        self.timer.has_expired = True

    @rule()
    def a_user_waits(self) -> None:
        is_free = self.holder is Holder.NONE and not self.is_closed
        assert self.handoff.enter() == is_free
        if is_free:
            self.holder = Holder.USER
            self.workers += 1
        else:
            self.bystanders += 1

    @precondition(lambda self: self.workers)
    @rule(more=st.booleans())
    def the_user_with_the_work_leaves(self, more: bool) -> None:
        self.handoff.hand_back(more)
        self.handoff.leave()
        self.holder = Holder.THREAD if more else Holder.NONE
        self.workers -= 1

    @precondition(lambda self: self.bystanders)
    @rule()
    def a_user_without_the_work_leaves(self) -> None:
        self.handoff.leave()
        self.bystanders -= 1

    @rule()
    def the_transports_close(self) -> None:
        self.handoff.close()
        self.is_closed = True

    @invariant()
    def one_at_a_time_has_the_work(self) -> None:
        assert self.handoff.holder is self.holder
        assert self.workers == (self.holder is Holder.USER)
        if not self.is_closed:
            assert (self.thread is Thread.WORKS) <= (self.holder is Holder.THREAD)
        assert self.handoff.num_users == self.workers + self.bystanders
        assert self.handoff.await_user(0) == (not self.workers)

    @invariant()
    def the_timer_is_off_while_a_user_has_the_work(self) -> None:
        assert self.timer.is_set == (not self.workers)

    @invariant()
    def the_thread_wakes_up_for_work_that_no_user_does(self) -> None:
        if self.thread is Thread.PARKED:
            assert self.workers or self.timer.is_set

    @invariant()
    def a_polling_thread_wakes_up_when_a_user_takes_the_work(self) -> None:
        if self.thread is Thread.POLLS and self.workers:
            poller = select.poll()
            poller.register(self.handoff.taken_fd, select.POLLIN)
            assert poller.poll(0)


TestProgressHandoff = ProgressHandoffMachine.TestCase
