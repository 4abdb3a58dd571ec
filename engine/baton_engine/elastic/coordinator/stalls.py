"""Detects stalled engine loops in processes that still send statuses.

- Some ranks wait in an exchange of votes for `stall_after_s`. If exactly one rank has not entered
  the exchange, that rank is stalled. Otherwise all ranks are probed.
- A step runs for `step_stall_after_s`. All ranks are probed, because ranks wait for each other
  inside a step, and the statuses do not show which rank is late.

A probe is an urgent generation of all members. It interrupts a waiting rank, which reports within
milliseconds that its generation is broken. A rank that does not report this within `stall_after_s`
is stalled and excluded. If all ranks report in time, the step was only slow: it is run again, and
the limit of the next step is doubled.

The coordinator measures durations from the last change of a rank's status.
"""

from __future__ import annotations

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.operation import is_in
from baton_engine.elastic.coordinator.roster import Rank, Roster
from baton_protocol.topology import Activity, Generation, RankPhase, TopologyMember

#: Maximum limit of a step, as a multiple of `step_stall_after_s`.
MAX_LIMIT_FACTOR = 8


class Stalls:
    """Finds stalled ranks and marks them in the roster."""

    def __init__(self, roster: Roster, config: ControllerConfig) -> None:
        self._roster = roster
        self._config = config
        self._limit_factor = 1
        #: Why all members have to be probed; empty if no stall is suspected.
        self.reason = ""

    def update(self, present: Generation | None, now: float) -> None:
        """Mark a stalled rank. If a stall is suspected but its cause is unknown, set `reason`.

        A rank is stalled if all other ranks wait for it, one of them for more than `stall_after_s`.
        The cause is unknown if a rank has waited that long in any other case, or if a step exceeds
        its time limit. The controller then probes all ranks.
        """
        self.reason = ""
        ranks = [] if present is None else self._ranks(present)
        waiting = [rank for rank in ranks if rank.status.activity is Activity.WAITS]
        others = [rank for rank in ranks if rank.status.activity is not Activity.WAITS]
        step_limit_s = self._config.step_stall_after_s * self._limit_factor
        if any(now - rank.moved > self._config.stall_after_s for rank in waiting):
            if len(others) == 1:
                self._mark_stalled([others[0].status.member])
            else:
                self.reason = (
                    "ranks have waited for each other for more than "
                    f"{self._config.stall_after_s:g} s"
                )
        elif any(
            now - rank.moved > step_limit_s
            for rank in others
            if rank.status.activity is Activity.RUNS
        ):
            self.reason = f"a step has run for more than {step_limit_s:g} s"

    def on_target(self) -> None:
        """Double the time limit of steps if a stall is suspected. Call this for each new target.

        The new target is then a probe, which interrupts all ranks, also those whose step is only
        slow. The longer limit gives such a step time to end.
        """
        if self.reason:
            self._limit_factor = min(2 * self._limit_factor, MAX_LIMIT_FACTOR)

    def exclude_stalled(self, target: Generation, since: float, now: float) -> str:
        """Mark members as stalled if they do not react to an urgent target within `stall_after_s`.

        A member that has not reacted still serves in another generation than `target`.

        Args:
            target: the generation in preparation. A target is urgent if the present generation
                cannot continue or seems stalled.
            since: start of the preparation, on the clock of `now`.
            now: the monotonic time, in seconds.

        Returns:
            The names of the stalled members, separated by commas. Empty: no member is stalled.
        """
        if not target.urgent or now - since <= self._config.stall_after_s:
            return ""
        living = self._roster.living
        stalled = [
            member
            for member in target.members
            if (status := living.get(member.instance_id)) is not None
            and status.phase is RankPhase.SERVING
            and not is_in(status, target)
        ]
        if stalled:
            self._mark_stalled(stalled)
        return ", ".join(member.name for member in stalled)

    def _mark_stalled(self, members: list[TopologyMember]) -> None:
        """Treat members as dead until their status shows progress."""
        self._limit_factor = 1
        self._roster.stalled.update(member.instance_id for member in members)

    def _ranks(self, present: Generation) -> list[Rank]:
        """Return the members of `present` if there are several and all serve, else no members."""
        ranks = [
            self._roster.ranks[each.instance_id]
            for each in present.members
            if each.instance_id in self._roster.living
        ]
        all_serve = all(
            rank.status.phase is RankPhase.SERVING and is_in(rank.status, present) for rank in ranks
        )
        return ranks if all_serve and len(ranks) == present.size > 1 else []
