"""When a container that ended may run again: exponential backoff that forgets after a long run. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackoffPolicy:
    """All in seconds."""

    base_s: float = 1.0
    cap_s: float = 30.0
    reset_after_s: float = 60.0  # a run at least this long counts as healthy

    def next_delay(self, previous_s: float, ran_s: float) -> float:
        """The delay before the next start, given the delay before the run that just ended (0 before the first run)."""
        if previous_s <= 0 or ran_s >= self.reset_after_s:
            return min(self.base_s, self.cap_s)
        return min(previous_s * 2, self.cap_s)
