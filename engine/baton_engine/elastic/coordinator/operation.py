"""One change of a group's topology: what it leads to, how far it is, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.elastic.coordinator.roster import GenerationKey, key_of
from baton_protocol.topology import Generation, Member, OperationPhase, OperationStatus

ACTIVE = frozenset({OperationPhase.WAITING, OperationPhase.PREPARING, OperationPhase.COMMITTING})


@dataclass(frozen=True, slots=True)
class Need:
    """What should be done now."""

    kind: str
    """form, scale, recover or rebalance."""
    wanted: frozenset[str]
    """Names."""
    members: tuple[Member, ...]
    """Of the generation that can be made of those that are there, in rank order."""
    missing: tuple[str, ...] = ()
    """Names that are worth waiting for."""
    urgent: bool = False
    reason: str = ""


@dataclass(slots=True)
class Operation:
    kind: str
    operation_id: str
    """Empty: nobody asked for it."""
    wanted: frozenset[str]
    since: float
    """When its present phase began."""
    phase: OperationPhase = OperationPhase.WAITING
    target: Generation | None = None
    previous: GenerationKey | None = None
    """What it replaces."""
    reason: str = ""
    moves: int = 0
    """Experts that ranks must get, copies counted."""
    progress: int = 0
    """Ranks that have done what the commit asks of them."""
    progress_at: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.phase in ACTIVE

    @property
    def committed(self) -> bool:
        return self.phase is OperationPhase.COMMITTING

    @property
    def words(self) -> str:
        """For logs."""
        number = "" if self.target is None else f" to generation {self.target.number}"
        return f"operation {self.operation_id or '-'} ({self.kind}{number})"

    def enter(self, phase: OperationPhase, now: float, reason: str = "") -> None:
        self._seconds[self.phase] = now - self.since
        self.phase, self.since, self.reason = phase, now, reason

    def seconds(self, now: float) -> dict[str, float]:
        """By phase; the present one so far."""
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
    """That another controller had committed `target` in, to replace `previous`."""
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
    """An operation that is over, for metrics."""

    kind: str
    outcome: OperationPhase
    seconds: dict[str, float]
    """By phase."""
    moves: int
    """Of experts; 0 if the generation was not adopted."""
