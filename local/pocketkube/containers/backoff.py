"""Exponential backoff between the restarts of a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackoffPolicy:
    """The delay before a restart: at first `base_s`, then twice the previous one, up to `cap_s`."""

    base_s: float = 1.0
    cap_s: float = 30.0
    #: After a run of at least this length, the next delay is `base_s`.
    reset_after_s: float = 60.0

    def next_delay(self, previous_s: float, ran_s: float) -> float:
        """Return the delay before the next restart, in seconds.

        Args:
            previous_s: the delay before the run that just ended, in seconds; 0 if that was the
                first run.
            ran_s: the duration of the run that just ended, in seconds.
        """
        if previous_s <= 0 or ran_s >= self.reset_after_s:
            return min(self.base_s, self.cap_s)
        return min(previous_s * 2, self.cap_s)
