"""Loops that stand still while their process answers: which rank the others wait for, as far as their reports tell.

    some wait in an exchange of votes for `stall_after_s`    if one rank alone does not wait there, it is that one;
                                                             else all are asked
    a step runs for `step_stall_after_s`                     all are asked: inside a step ranks wait for each other, too, and nobody
                                                             outside sees who for

To ask is to make an urgent generation of all of them. Whoever waits is interrupted by it, and says within milliseconds that its
generation is broken. Who still says nothing of the kind after `stall_after_s` stands still, and is left out. Asked in vain, a step
was only slow, and is run again: the next one is given twice the time.

Time is the coordinator's own: since a report was last different from the one before.
"""

from __future__ import annotations

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.operation_progress import is_in
from baton_engine.elastic.coordinator.roster import Rank, Roster
from baton_protocol.topology import Activity, Generation, Member, RankPhase

MAX_PATIENCE = 8
"""Times `step_stall_after_s`."""


class Stalls:
    def __init__(self, roster: Roster, config: ControllerConfig) -> None:
        self._roster = roster
        self._config = config
        self._patience = 1
        self.reason = ""
        """Why the present generation gets nowhere though nobody can be blamed; empty: it may well get on."""

    def look(self, present: Generation | None, now: float) -> None:
        """Gives the rank up that all others wait for."""
        self.reason = ""
        ranks = [] if present is None else self._ranks(present)
        waiting = [rank for rank in ranks if rank.status.activity is Activity.WAITS]
        others = [rank for rank in ranks if rank.status.activity is not Activity.WAITS]
        step_limit_s = self._config.step_stall_after_s * self._patience
        if any(now - rank.moved > self._config.stall_after_s for rank in waiting):
            if len(others) == 1:
                self._give_up([others[0].status.member])
            else:
                self.reason = f"ranks wait for each other since {self._config.stall_after_s:g} s"
        elif any(
            now - rank.moved > step_limit_s
            for rank in others
            if rank.status.activity is Activity.RUNS
        ):
            self.reason = f"a step has not ended for {step_limit_s:g} s"

    def on_target(self) -> None:
        """There is another one; if for `reason`, all members are asked by it."""
        if self.reason:
            self._patience = min(2 * self._patience, MAX_PATIENCE)

    def exclude_stalled(self, target: Generation, asked_at: float, now: float) -> str:
        """Names of members of an urgent target that serve on in the generation before it, as if they had not heard of it."""
        if not target.urgent or now - asked_at <= self._config.stall_after_s:
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
            self._give_up(stalled)
        return ", ".join(member.name for member in stalled)

    def _give_up(self, members: list[Member]) -> None:
        """They count as dead until they move."""
        self._patience = 1
        self._roster.stalled.update(member.instance_id for member in members)

    def _ranks(self, present: Generation) -> list[Rank]:
        """Its members; none unless all of them serve in it and there are others to wait for."""
        ranks = [
            self._roster.ranks[each.instance_id]
            for each in present.members
            if each.instance_id in self._roster.living
        ]
        all_serve = all(
            rank.status.phase is RankPhase.SERVING and is_in(rank.status, present) for rank in ranks
        )
        return ranks if all_serve and len(ranks) == present.size > 1 else []
