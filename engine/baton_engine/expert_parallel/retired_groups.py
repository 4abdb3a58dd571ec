"""Control groups of past generations, which are closed after a grace period.

An immediate close could reset the connection of a slower member that still reads from the group.
"""

from __future__ import annotations

import time

from baton_engine.distributed.group import RETIREMENT_GRACE_S
from baton_engine.expert_parallel.control_group import ControlGroup


class RetiredGroups:
    """Control groups of past generations, which are not closed yet.

    The engine cores of one generation exchange votes in a control group.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[float, ControlGroup]] = []

    def add(self, group: ControlGroup | None) -> None:
        """Add a control group that this rank no longer uses. None is ignored."""
        if group is not None:
            self._groups.append((time.monotonic() + RETIREMENT_GRACE_S, group))

    def advance(self) -> None:
        """Close the oldest control group if its grace period is over."""
        if self._groups and time.monotonic() >= self._groups[0][0]:
            self._groups.pop(0)[1].close()

    def close_all(self) -> None:
        while self._groups:
            self._groups.pop()[1].close()
