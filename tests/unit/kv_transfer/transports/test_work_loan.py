"""The loan of the work: its calls in any order, by the thread and by users."""

from __future__ import annotations

import enum
import select
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv_transfer.transports import work_loan
from baton_kv_transfer.transports.work_loan import Holder, WorkLoan


class FakeAlarm:
    """An alarm that rings when the test wants it."""

    def __init__(self) -> None:
        self.is_set = self.rang = False

    def set(self, delay_ns: int) -> None:
        self.is_set, self.rang = delay_ns > 0, False

    def wait(self, timeout_s: float) -> bool:
        return self.rang

    def close(self) -> None:
        self.is_set = False


class Thread(enum.Enum):
    """What the thread does, and what it sees at that time."""

    WORKS = enum.auto()
    #: It sees events, and that a user takes the work.
    POLLS = enum.auto()
    #: It sees the alarm only.
    PARKED = enum.auto()


class WorkLoanMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        with mock.patch.object(work_loan, "Alarm", FakeAlarm):
            self.loan = WorkLoan()
        assert isinstance(self.loan.alarm, FakeAlarm)
        self.alarm = self.loan.alarm
        self.thread = Thread.WORKS
        self.holder = Holder.THREAD
        #: Users in a wait: those with the work, and those without.
        self.workers = self.bystanders = 0
        self.is_closed = False

    def teardown(self) -> None:
        self.loan.close_descriptors()

    @precondition(lambda self: self.thread is Thread.WORKS and not self.is_closed)
    @rule()
    def the_thread_has_nothing_left_to_do(self) -> None:
        self.loan.rest()
        self.thread, self.holder = Thread.POLLS, Holder.NONE

    @precondition(lambda self: self.thread is not Thread.WORKS)
    @rule()
    def the_thread_wakes_up(self) -> None:
        if self.alarm.rang:
            self.holder = Holder.THREAD
        may_work = self.holder is Holder.THREAD or self.is_closed
        assert self.loan.resume() == may_work
        self.thread = Thread.WORKS if may_work else Thread.PARKED

    @precondition(lambda self: self.alarm.is_set)
    @rule()
    def the_alarm_rings(self) -> None:
        self.alarm.rang = True

    @rule()
    def a_user_waits(self) -> None:
        is_free = self.holder is Holder.NONE and not self.is_closed
        assert self.loan.borrow() == is_free
        if is_free:
            self.holder = Holder.USER
            self.workers += 1
        else:
            self.bystanders += 1

    @precondition(lambda self: self.workers)
    @rule(more=st.booleans())
    def the_user_with_the_work_leaves(self, more: bool) -> None:
        self.loan.give_back(more)
        self.loan.leave()
        self.holder = Holder.THREAD if more else Holder.NONE
        self.workers -= 1

    @precondition(lambda self: self.bystanders)
    @rule()
    def a_user_without_the_work_leaves(self) -> None:
        self.loan.leave()
        self.bystanders -= 1

    @rule()
    def the_transports_close(self) -> None:
        self.loan.close()
        self.is_closed = True

    @invariant()
    def one_at_a_time_has_the_work(self) -> None:
        assert self.loan.holder is self.holder
        assert self.workers == (self.holder is Holder.USER)
        if not self.is_closed:
            assert (self.thread is Thread.WORKS) <= (self.holder is Holder.THREAD)
        assert self.loan.num_users == self.workers + self.bystanders
        assert self.loan.await_user(0) == (not self.workers)

    @invariant()
    def the_alarm_is_off_while_a_user_has_the_work(self) -> None:
        assert self.alarm.is_set == (not self.workers)

    @invariant()
    def the_thread_learns_of_work_that_no_user_does(self) -> None:
        if self.thread is Thread.PARKED:
            assert self.workers or self.alarm.is_set

    @invariant()
    def a_polling_thread_is_told_that_a_user_took_the_work(self) -> None:
        if self.thread is Thread.POLLS and self.workers:
            poller = select.poll()
            poller.register(self.loan.taken_fd, select.POLLIN)
            assert poller.poll(0)


TestWorkLoan = WorkLoanMachine.TestCase
