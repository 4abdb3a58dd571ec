"""Vote groups of past generations, which are closed after a grace period.

An immediate close could reset the connection of a slower member that still reads from the group.
"""

from __future__ import annotations

import time

from baton_engine.distributed.group import RETIREMENT_GRACE_S
from baton_engine.expert_parallel.vote_group import VoteGroup


class RetiredGroups:
    """Vote groups of past generations, which are not closed yet.

    The engine cores of one generation exchange votes in a vote group.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[float, VoteGroup]] = []

    def add(self, group: VoteGroup | None) -> None:
        """Add a vote group that this rank no longer uses. None is ignored."""
        if group is not None:
            self._groups.append((time.monotonic() + RETIREMENT_GRACE_S, group))

    def advance(self) -> None:
        """Close the group that was added first, if RETIREMENT_GRACE_S seconds have passed."""
        if self._groups and time.monotonic() >= self._groups[0][0]:
            self._groups.pop(0)[1].close()

    def close_all(self) -> None:
        while self._groups:
            self._groups.pop()[1].close()
