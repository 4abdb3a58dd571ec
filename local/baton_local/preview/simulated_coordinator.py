"""The simulated coordinator of an expert-parallel group.

The coordinator commits every requested topology.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)

NEVER = datetime.max.replace(tzinfo=UTC)  #: Time of an event that does not happen.
PREPARE = timedelta(seconds=5)  #: Simulated duration of the preparation of a topology.
COMMIT = timedelta(seconds=1)  #: Simulated duration of the commit of a topology.


class SimulatedCoordinator:
    """Prepares a topology generation for each topology request, then commits the generation."""

    def __init__(self, ranks: Iterable[str]) -> None:
        """Start with `ranks` as topology generation 1. Without ranks there is no topology."""
        self.ranks = sorted(ranks)
        #: Time at which the current phase ends; `NEVER` if no operation is running.
        self.phase_ends_at = NEVER
        self._generation = 1 if self.ranks else 0
        self._operation: OperationStatus | None = None
        self._request = TopologyRequest(operation_id="", members=self.ranks)
        self._target: list[str] = []

    def request(self, request: TopologyRequest) -> None:
        self._request = request

    def status(self, registered: Iterable[str]) -> TopologyStatus:
        """Return the answer to GET /topology.

        Args:
            registered: names of the members whose engine is running.
        """
        members = []
        for name in registered:
            rank = self.ranks.index(name) if name in self.ranks else None
            phase = RankPhase.STANDBY if rank is None else RankPhase.SERVING
            members.append(MemberStatus(name=name, instance_id=name, phase=phase, rank=rank))
        return TopologyStatus(
            generation=self._generation if self.ranks else 0,
            desired=sorted(self._request.members),
            members=members,
            operation=self._operation,
        )

    def advance(self, now: datetime, usable: set[str]) -> list[str]:
        """Remove unusable ranks, and begin or continue a change of the topology.

        A change begins if the requested members that are usable differ from the current ranks, and
        no commit is in progress. Each change first prepares the next generation, and then commits
        it.

        Args:
            usable: names of the members that can be ranks.

        Returns:
            A description of each event.
        """
        events = []
        if not usable.issuperset(self.ranks):  # a rank was deleted; the others continue without it
            self.ranks = [name for name in self.ranks if name in usable]
            self._generation += bool(self.ranks)
        if self._operation is not None and self.phase_ends_at <= now:
            events.append(self._end_phase(self._operation, now))
        target = sorted(usable.intersection(self._request.members))
        phase = None if self._operation is None else self._operation.phase
        current = self._target if phase is OperationPhase.PREPARING else self.ranks
        if phase is not OperationPhase.COMMITTING and target and target != current:
            self._target, self.phase_ends_at = target, now + PREPARE
            self._operation = OperationStatus(
                operation_id=self._request.operation_id,
                kind="scale" if self.ranks else "form",
                phase=OperationPhase.PREPARING,
                generation=self._generation + 1,
            )
        return events

    def _end_phase(self, operation: OperationStatus, now: datetime) -> str:
        if operation.phase is OperationPhase.PREPARING:
            operation.phase, self.phase_ends_at = OperationPhase.COMMITTING, now + COMMIT
            return f"generation {operation.generation} is prepared"
        operation.phase, self.phase_ends_at = OperationPhase.DONE, NEVER
        self.ranks, self._generation = self._target, operation.generation
        return (
            f"generation {operation.generation} is committed, its ranks are {', '.join(self.ranks)}"
        )
