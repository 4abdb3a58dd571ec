"""The earlier decisions that a decision depends on: recommendations, changes and the last breach.

Consecutive equal recommendations are one entry. Recommendations from before a gap do not count. So
after a restart the operator shrinks no group before a whole stabilisation window has passed.
"""

from __future__ import annotations

from math import inf

import msgspec

#: After a longer time without a decision, earlier recommendations do not count.
LONGEST_GAP_S = 120.0


class Run(msgspec.Struct, frozen=True):
    """The same recommendation from `since` to `until`, in seconds of the clock of `now`."""

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
    #: As `recommendations.load_per_engine` returns it.
    load_per_engine: float


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The decision history of one role."""

    #: Recommendations, oldest first, without gaps.
    runs: tuple[Run, ...] = ()
    #: Recent changes, and the last one.
    changes: tuple[Change, ...] = ()
    breach: Breach | None = None
    #: Time since which no request was in progress. None: there is one, or it is not known.
    idle_since: float | None = None
    #: Last time at which the pods differed from the desired ones. Earlier measurements do not
    #: count.
    unsettled_until: float = 0.0

    def covers(self, now: float, seconds: float) -> bool:
        """Return whether recommendations cover the last `seconds` without a gap."""
        return self.knows(now) and self.runs[0].since <= now - seconds

    def recommended(self, now: float, seconds: float) -> list[int]:
        """Return the sizes recommended in the last `seconds`."""
        runs = self.runs if self.knows(now) else ()
        return [run.size for run in runs if run.until >= now - seconds]

    def changed(self, now: float, seconds: float) -> int:
        """Return by how much the size has changed in the last `seconds`."""
        return sum(change.delta for change in self.changes if change.at > now - seconds)

    def knows(self, now: float) -> bool:
        """Return whether the last recommendation is at most LONGEST_GAP_S older than `now`."""
        return bool(self.runs) and now - self.runs[-1].until <= LONGEST_GAP_S

    @property
    def changed_at(self) -> float:
        """Time of the last change of the size; minus infinity without one."""
        return self.changes[-1].at if self.changes else -inf

    @property
    def last_delta(self) -> int:
        """The last change of the size; 0 without one."""
        return self.changes[-1].delta if self.changes else 0

    def last_recommended(self, now: float) -> int | None:
        """Return the last recommendation; None after a gap."""
        return self.runs[-1].size if self.knows(now) else None

    def with_decision(
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
        """Return this history with a decision at `now`.

        Args:
            keep_s: entries older than this are dropped.
            change: by how much this decision changes the size.
            breach: the missed target that the decision reacts to.
            idle: new value of `idle_since`.
            settled: whether the pods are the desired ones.
        """
        known = self.runs if self.knows(now) else ()
        runs = tuple(run for run in known if run.until >= now - keep_s)
        if runs and runs[-1].size == recommended:
            runs = (*runs[:-1], Run(recommended, runs[-1].since, now))
        else:
            # The previous recommendation held until now, so that runs leave no gap.
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
