"""What a decision must know of those before it: recommendations of late, changes of size, a size that was too small.

Serialisable, and small: equal recommendations in a row are one entry. What is restored after a gap counts as no recommendation at
all, so an operator that was away shrinks nothing before it has looked on for a whole stabilisation window.
"""

from __future__ import annotations

from math import inf

import msgspec

LONGEST_GAP_S = 120.0
"""Without a decision for longer, what was recommended before says nothing about the time between."""


class Run(msgspec.Struct, frozen=True):
    """The same recommendation from `since` to `until`, seconds of the clock of `now`."""

    size: int
    since: float
    until: float


class Change(msgspec.Struct, frozen=True):
    """The size was changed by `delta` at `at`."""

    at: float
    delta: int


class Breach(msgspec.Struct, frozen=True):
    """A load per engine at which a target was missed."""

    at: float
    load_per_engine: float
    """`signals.load_per_engine` of that time."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Of one role."""

    runs: tuple[Run, ...] = ()
    """Recommendations, oldest first, without gaps."""
    changes: tuple[Change, ...] = ()
    """Of late, and the last one."""
    breach: Breach | None = None
    idle_since: float | None = None
    """Since when nobody wanted anything. None: somebody does, or nobody knows."""
    unsettled_until: float = 0.0
    """The last time when the pods were not what they should be: what was measured before does not count."""

    def covers(self, now: float, seconds: float) -> bool:
        """Whether there was a recommendation all the time for `seconds` up to `now`."""
        return bool(self.runs) and not self._lost(now) and self.runs[0].since <= now - seconds

    def recommended(self, now: float, seconds: float) -> list[int]:
        """The sizes recommended in the last `seconds`."""
        return (
            [] if self._lost(now) else [run.size for run in self.runs if run.until >= now - seconds]
        )

    def changed(self, now: float, seconds: float) -> int:
        """By how much the size has changed in the last `seconds`."""
        return sum(change.delta for change in self.changes if change.at > now - seconds)

    def knows(self, now: float) -> bool:
        """Whether decisions went on until now: what was before a gap counts no more."""
        return not self._lost(now)

    @property
    def changed_at(self) -> float:
        """When the size changed last; before everything if it did not."""
        return self.changes[-1].at if self.changes else -inf

    @property
    def last_delta(self) -> int:
        """Of the last change of size; 0: there was none."""
        return self.changes[-1].delta if self.changes else 0

    def last_recommended(self, now: float) -> int | None:
        """None: there was none of late."""
        return None if self._lost(now) else self.runs[-1].size

    def noting(
        self,
        now: float,
        recommended: int,
        *,
        keep_s: float,
        change: int = 0,
        breach: Breach | None = None,
        idle: float | None = None,
        settled: bool = True,
    ) -> History:
        """This, and a decision at `now`.

        Args:
            keep_s: what is older is forgotten.
            change: of the size, by this decision.
            breach: that it was made for.
            idle: since when nobody has wanted anything. None: somebody does, or nobody knows.
            settled: the pods are what they should be.
        """
        runs = (
            () if self._lost(now) else tuple(run for run in self.runs if run.until >= now - keep_s)
        )
        if runs and runs[-1].size == recommended:
            runs = (*runs[:-1], Run(recommended, runs[-1].since, now))
        else:
            # The one before held until now, so that runs leave no gap.
            runs = (
                *runs[:-1],
                *(Run(run.size, run.since, now) for run in runs[-1:]),
                Run(recommended, now, now),
            )
        changes = (
            tuple(item for item in self.changes[:-1] if item.at > now - keep_s) + self.changes[-1:]
        )
        return History(
            runs=runs,
            changes=(*changes, Change(now, change)) if change else changes,
            breach=breach or self.breach,
            idle_since=idle,
            unsettled_until=self.unsettled_until if settled and not change else now,
        )

    def _lost(self, now: float) -> bool:
        return not self.runs or now - self.runs[-1].until > LONGEST_GAP_S
