"""An operation: one change of a group's topology, with its phase and durations."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.elastic.coordinator.roster import GenerationKey, key_of
from baton_protocol.topology import Generation, Member, OperationPhase, OperationStatus

ACTIVE = frozenset({OperationPhase.WAITING, OperationPhase.PREPARING, OperationPhase.COMMITTING})


@dataclass(frozen=True, slots=True)
class Need:
    """The change that is needed now."""

    #: form, scale, recover or rebalance.
    kind: str
    #: Names of the desired members.
    wanted: frozenset[str]
    #: Members of the generation that is possible now, in rank order.
    members: tuple[Member, ...]
    #: Names to wait for.
    missing: tuple[str, ...] = ()
    urgent: bool = False
    reason: str = ""


@dataclass(slots=True)
class Operation:
    """A change of the topology."""

    kind: str
    #: Id of the request; empty for automatic operations.
    operation_id: str
    wanted: frozenset[str]
    #: Start of the current phase.
    since: float
    phase: OperationPhase = OperationPhase.WAITING
    target: Generation | None = None
    #: Generation that the target replaces.
    previous: GenerationKey | None = None
    reason: str = ""
    #: Experts that ranks must receive, with copies.
    moves: int = 0
    #: Minus the number of ranks that have not completed the commit.
    progress: int = 0
    progress_at: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.phase in ACTIVE

    @property
    def committed(self) -> bool:
        return self.phase is OperationPhase.COMMITTING

    @property
    def label(self) -> str:
        """Return the id, kind and generation, for logs."""
        number = "" if self.target is None else f" to generation {self.target.number}"
        return f"operation {self.operation_id or '-'} ({self.kind}{number})"

    def enter(self, phase: OperationPhase, now: float, reason: str = "") -> None:
        self._seconds[self.phase] = now - self.since
        self.phase, self.since, self.reason = phase, now, reason

    def seconds(self, now: float) -> dict[str, float]:
        """Return the duration of each phase, with that of the current one until now."""
        return (
            {**self._seconds, self.phase: now - self.since} if self.active else dict(self._seconds)
        )

    def status(self, now: float) -> OperationStatus:
        return OperationStatus(
            operation_id=self.operation_id,
            kind=self.kind,
            phase=self.phase,
            generation=0 if self.target is None else self.target.number,
            reason=self.reason,
            seconds=self.seconds(now),
        )


def resumed(target: Generation, previous: Generation | None, now: float) -> Operation:
    """Return the operation in which another controller committed `target`."""
    kind = "recover" if target.urgent else "form" if previous is None else "scale"
    operation = Operation(
        kind, target.operation_id, frozenset(each.name for each in target.members), now
    )
    operation.target, operation.previous = target, None if previous is None else key_of(previous)
    operation.progress_at = now
    operation.enter(OperationPhase.COMMITTING, now)
    return operation


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended, for metrics."""

    kind: str
    outcome: OperationPhase
    #: Duration by phase.
    seconds: dict[str, float]
    #: Experts that moved; 0 if the generation was not committed.
    moves: int
