"""The largest value of a recent time window."""

from __future__ import annotations


class RecentMaximum:
    """The largest value added in the current or the previous time window.

    Windows are `window_s` seconds long and follow each other without gaps.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        #: Number of the window of the last `add`. Windows start at multiples of `window_s`.
        self._window = 0
        self._current = 0.0
        self._previous = 0.0

    @property
    def value(self) -> float:
        """The maximum as of the last call of `add`, however long ago. 0 before the first call."""
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
