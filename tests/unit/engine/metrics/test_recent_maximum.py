"""Tests for the maximum of the last minutes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_engine.metrics.recent_maximum import RecentMaximum

WINDOW_S = 10.0


@given(
    st.lists(
        st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 100.0)),
        min_size=1,
        max_size=30,
    )
)
def test_it_keeps_values_for_one_to_two_windows(additions: list[tuple[float, float]]) -> None:
    recent, now, added = RecentMaximum(WINDOW_S), 0.0, []
    for gap_s, value in additions:
        now += gap_s
        recent.add(value, now)
        added.append((now, value))
        young = max(value for at, value in added if now - at <= WINDOW_S)
        not_old = max(value for at, value in added if now - at <= 2 * WINDOW_S)
        assert young <= recent.value <= not_old


def test_it_is_zero_without_values() -> None:
    assert RecentMaximum(WINDOW_S).value == 0.0
