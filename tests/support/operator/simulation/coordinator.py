"""A simulated coordinator, which may be down or lose its state. For the tests of the Reconciler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton_protocol.topology import MemberStatus, RankPhase, TopologyRequest, TopologyStatus

#: Time in which ranks find a new coordinator.
REGISTERED_WITHIN_S = 5.0


@dataclass
class Coordinator:
    """A simulated coordinator. `step()` commits a requested topology of the running members."""

    #: Running ranks: instance by name.
    started: Callable[[], dict[str, str]]
    clock: Callable[[], float]
    generation: int = 0
    #: Instance by name, in the order of the ranks.
    ranks: dict[str, str] = field(default_factory=dict)
    is_up: bool = True
    #: The next requests that get no reply and have no effect.
    refuses: int = 0
    #: The next requests that take effect but whose replies are lost.
    loses: int = 0
    _asked_for: list[str] | None = None
    #: Ranks that have not registered since it started.
    _strangers: set[str] = field(default_factory=set)
    _since: float = 0.0

    async def topology(self, host: str, key: Any = None) -> TopologyStatus | None:
        return self._answer()

    async def request_topology(
        self, host: str, request: TopologyRequest, key: Any = None
    ) -> TopologyStatus | None:
        if self.is_up and not self.refuses:
            self._asked_for = list(request.members)
        return self._answer()

    def _answer(self) -> TopologyStatus | None:
        if self.refuses:
            self.refuses -= 1
            return None
        if self.loses:
            self.loses -= 1
            return None
        if not self.is_up:
            return None
        running = self.started()
        self._drop_ended_ranks(running)
        found = {
            name: instance for name, instance in running.items() if name not in self._strangers
        }
        members = [
            MemberStatus(
                name=name,
                instance_id=instance,
                phase=RankPhase.SERVING if name in self.ranks else RankPhase.STANDBY,
                rank=list(self.ranks).index(name) if name in self.ranks else None,
            )
            for name, instance in found.items()
        ]
        is_known = any(name in found for name in self.ranks)
        desired = self._asked_for if self._asked_for is not None else self.ranks if is_known else ()
        return TopologyStatus(
            generation=self.generation if is_known else 0, desired=sorted(desired), members=members
        )

    def dies(self) -> None:
        self.is_up, self._asked_for = False, None

    def returns(self) -> None:
        """Restart the coordinator. It has no ranks until they register again."""
        if not self.is_up:
            self.is_up, self._strangers, self._since = True, set(self.started()), self.clock()

    def step(self, *, found: bool = True) -> None:
        """Advance the coordinator: commit the requested topology if possible.

        Args:
            found: whether all ranks have registered since the last restart.
        """
        if not self.is_up:
            return
        if found or self.clock() >= self._since + REGISTERED_WITHIN_S:
            self._strangers.clear()
        running = self.started()
        self._drop_ended_ranks(running)
        ready = {name: running[name] for name in self._asked_for or () if name in running}
        if ready and ready != self.ranks and not self._strangers:
            self.generation, self.ranks = self.generation + 1, ready

    def _drop_ended_ranks(self, running: dict[str, str]) -> None:
        self.ranks = {
            name: instance for name, instance in self.ranks.items() if running.get(name) == instance
        }
