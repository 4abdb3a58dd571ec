"""The alarm: a timer as a descriptor."""

from __future__ import annotations

from baton_kv_transfer.transports.alarm import Alarm

HOUR_NS = 3600 * 10**9


def test_an_alarm_rings_until_it_is_set_again() -> None:
    alarm = Alarm()
    assert not alarm.wait(0)
    alarm.set(1)
    assert alarm.wait(60)
    assert alarm.wait(0)
    alarm.set(HOUR_NS)
    assert not alarm.wait(0)
    alarm.set(1)
    assert alarm.wait(60)
    alarm.set(0)
    assert not alarm.wait(0.01)
    alarm.close()
