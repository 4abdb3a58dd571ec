"""The largest value of the last minutes."""

from __future__ import annotations

import math


class RecentMaximum:
    """The largest value that was added in the last `window_s` to `2 * window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._window_started = -math.inf
        self._current = 0.0
        self._previous = 0.0

    @property
    def value(self) -> float:
        """The maximum at the time of the last `add`; 0 before it."""
        return max(self._current, self._previous)

    def add(self, value: float, now: float) -> None:
        """Add a value.

        Args:
            value: not negative.
            now: monotonic time in seconds.
        """
        if (age_s := now - self._window_started) >= self._window_s:
            self._previous = self._current if age_s < 2 * self._window_s else 0.0
            self._current, self._window_started = 0.0, now
        self._current = max(self._current, value)
