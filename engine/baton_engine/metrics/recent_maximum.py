"""The largest value of a recent time window."""

from __future__ import annotations


class RecentMaximum:
    """The largest value added in the current and the previous window of `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        #: Number of the window of the last `add`. Windows start at multiples of `window_s`.
        self._window = 0
        self._current = 0.0
        self._previous = 0.0

    @property
    def value(self) -> float:
        """The maximum at the time of the last `add`. 0 if no value was added."""
        return max(self._current, self._previous)

    def add(self, value: float, now: float) -> None:
        """Add a value.

        Args:
            value: not negative.
            now: monotonic time in seconds.
        """
        window = int(now // self._window_s)
        if window != self._window:
            self._previous = self._current if window == self._window + 1 else 0.0
            self._current, self._window = 0.0, window
        self._current = max(self._current, value)
