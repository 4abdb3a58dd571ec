"""A timer with a file descriptor."""

from __future__ import annotations

from baton_kv_transfer.transports.timer_fd import TimerFD

HOUR_NS = 3600 * 10**9


def test_a_timer_stays_expired_until_it_is_set_again() -> None:
    timer = TimerFD()
    assert not timer.wait(0)
    timer.set(1)
    assert timer.wait(60)
    assert timer.wait(0)
    timer.set(HOUR_NS)
    assert not timer.wait(0)
    timer.set(1)
    assert timer.wait(60)
    timer.set(0)
    assert not timer.wait(0.01)
    timer.close()
