"""Heartbeats: silence in whole intervals, and the load from PONGs and own requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.engine_client.heartbeat import LOADING_FACTOR, HeartbeatMonitor
from baton_protocol.engine_messages import Pong


def silent_intervals(heartbeat: HeartbeatMonitor, count: int, *, elapsed_s: float = 0.5) -> None:
    for _ in range(count):
        heartbeat.begin_interval(0)
        heartbeat.end_interval(elapsed_s)


def test_a_silent_engine_is_suspect_and_later_dead() -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    silent_intervals(heartbeat, 1)
    assert not heartbeat.is_suspect
    silent_intervals(heartbeat, 1)
    assert heartbeat.is_suspect
    silent_intervals(heartbeat, 3)
    assert not heartbeat.is_dead(loading=False)
    silent_intervals(heartbeat, 1)
    assert heartbeat.is_dead(loading=False)
    assert not heartbeat.is_dead(loading=True)
    silent_intervals(heartbeat, 6 * (LOADING_FACTOR - 1))
    assert heartbeat.is_dead(loading=True)


def test_a_message_ends_the_silence_and_returns_whether_the_engine_was_suspect() -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    assert not heartbeat.record_message()
    silent_intervals(heartbeat, 5)
    assert heartbeat.record_message()
    assert not heartbeat.record_message()
    heartbeat.end_interval(0.5)  # the message arrived in this interval
    assert heartbeat.silence_s == 0.0


def test_long_gaps_between_pings_count_as_single_intervals() -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    silent_intervals(heartbeat, 2, elapsed_s=60.0)
    assert not heartbeat.is_dead(loading=False)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.5, 30.0)), max_size=40))
def test_an_engine_that_responds_in_one_of_three_intervals_is_never_dead(
    intervals: list[tuple[bool, float]],
) -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    silent = 0
    for answers, elapsed_s in intervals:
        heartbeat.begin_interval(0)
        silent = 0 if answers or silent == 2 else silent + 1
        if silent == 0:
            heartbeat.record_message()
        heartbeat.end_interval(elapsed_s)
        assert not heartbeat.is_dead(loading=False)


@pytest.mark.parametrize(
    ("at_ping", "now", "running", "waiting", "expected"),
    [
        (0, 0, 5, 2, 7),  # all are requests of other clients
        (3, 3, 3, 0, 3),  # all are requests of this client
        (3, 5, 10, 0, 12),  # two were sent since
        (5, 1, 10, 0, 6),  # four have ended since
        (0, 4, 0, 0, 4),
        (9, 9, 2, 0, 9),  # the PONG is older than the own count
    ],
)
def test_the_load_is_the_pongs_count_plus_requests_sent_since(
    at_ping, now, running, waiting, expected
) -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    assert heartbeat.num_requests(now) == now
    ping = heartbeat.begin_interval(at_ping)
    heartbeat.record_pong(Pong(ping.sequence, num_running=running, num_waiting=waiting))
    assert heartbeat.num_requests(now) == expected


def test_a_late_pong_is_matched_to_its_ping() -> None:
    heartbeat = HeartbeatMonitor(0.5, 3.0)
    first = heartbeat.begin_interval(0)
    heartbeat.begin_interval(7)
    heartbeat.record_pong(Pong(first.sequence, num_running=3))
    assert heartbeat.num_requests(7) == 10, (
        "the three do not include the seven sent after the first ping"
    )
