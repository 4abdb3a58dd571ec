"""The history on which a decision depends: recommendations, size changes and the last breach.

Consecutive equal recommendations are stored as one entry. Recommendations before a gap of more than
LONGEST_GAP_S are dropped. The history is empty after a restart of the operator. So no group shrinks
until new recommendations cover a whole stabilization window.
"""

from __future__ import annotations

from math import inf

import msgspec

#: Longest time in seconds between two decisions. Recommendations before a longer gap are ignored.
LONGEST_GAP_S = 120.0


class DecisionRun(msgspec.Struct, frozen=True):
    """A recommendation that stayed the same from `since` to `until`.

    Both times are in seconds of the monotonic clock with which decisions are made.
    """

    size: int  # recommended number of engines
    since: float
    until: float


class Change(msgspec.Struct, frozen=True):
    """A change of a group's size by `delta` engines at `at`, a time in seconds."""

    at: float
    delta: int


class Breach(msgspec.Struct, frozen=True):
    """The miss of a target, such as the TTFT target, after the group had shrunk."""

    at: float  # time in seconds at which the target was missed
    #: The load of one engine at that time, from `recommendations.load_per_engine`.
    load_per_engine: float


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Past decisions on the size of the prefill or decode group, as input of the next one.

    All times are in seconds of the same monotonic clock.
    """

    #: Recommendations, oldest first, without gaps.
    runs: tuple[DecisionRun, ...] = ()
    #: Recent size changes, oldest first. The last change is kept at any age.
    changes: tuple[Change, ...] = ()
    #: The last target that was missed after the size was reduced. None: there was none.
    breach: Breach | None = None
    #: Time since which no request was in progress. None: a request is in progress, or the time
    #: is not known.
    idle_since: float | None = None
    #: Last time at which the pods differed from the desired ones. Measurements before this time do
    #: not count.
    unsettled_until: float = 0.0

    def covers(self, now: float, seconds: float) -> bool:
        """Return whether the recommendations cover the time from `now - seconds` to `now`.

        A gap of at most LONGEST_GAP_S just before `now` is allowed.
        """
        return self.knows(now) and self.runs[0].since <= now - seconds

    def recommended(self, now: float, seconds: float) -> list[int]:
        """Return the sizes recommended in the last `seconds`; empty unless `knows(now)`."""
        runs = self.runs if self.knows(now) else ()
        return [run.size for run in runs if run.until >= now - seconds]

    def changed(self, now: float, seconds: float) -> int:
        """Return the net change of the size in the last `seconds`, in engines."""
        return sum(change.delta for change in self.changes if change.at > now - seconds)

    def knows(self, now: float) -> bool:
        """Return whether the history is up to date at `now`.

        It is up to date if the last recommendation is at most LONGEST_GAP_S old.
        """
        return bool(self.runs) and now - self.runs[-1].until <= LONGEST_GAP_S

    @property
    def changed_at(self) -> float:
        """Time of the last size change; minus infinity if the size never changed."""
        return self.changes[-1].at if self.changes else -inf

    @property
    def last_delta(self) -> int:
        """Number of engines that the last size change added; negative if it removed engines.

        0 if the size never changed.
        """
        return self.changes[-1].delta if self.changes else 0

    def last_recommended(self, now: float) -> int | None:
        """Return the last recommended size; None without one in the last LONGEST_GAP_S."""
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
        """Return a copy of this history that includes a decision at `now`.

        Args:
            recommended: size that the measurements recommend.
            keep_s: entries older than this many seconds are dropped.
            change: number of engines by which the decision changes the size.
            breach: the new value of `breach`, if a target is missed now. None: the value is kept.
            idle: new value of `idle_since`.
            settled: whether the existing pods are the desired ones. If not, or if `change` is not
                0, measurements before `now` do not count in later decisions.
        """
        known = self.runs if self.knows(now) else ()
        runs = tuple(run for run in known if run.until >= now - keep_s)
        if runs and runs[-1].size == recommended:
            runs = (*runs[:-1], DecisionRun(recommended, runs[-1].since, now))
        else:
            # The previous recommendation held until now, so that runs leave no gap.
            runs = (
                *runs[:-1],
                *(DecisionRun(run.size, run.since, now) for run in runs[-1:]),
                DecisionRun(recommended, now, now),
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
