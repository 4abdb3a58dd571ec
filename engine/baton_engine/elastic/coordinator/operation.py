"""An operation: one change of a group's topology, its phases, and the progress of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.elastic.coordinator.roster import GenerationKey, Roster, key_of, serves_in
from baton_protocol.topology import (
    ACTIVE_PHASES,
    Generation,
    OperationPhase,
    OperationStatus,
    Placement,
    RankPhase,
    Status,
    TopologyMember,
)


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """An automatic rebalance that is due.

    An imbalance is the load of the heaviest rank divided by the mean load, averaged over layers.
    """

    placement: Placement
    #: Measured imbalance of the present placement.
    before: float
    #: Imbalance of the new placement with the measured loads.
    after: float


@dataclass(slots=True)
class Operation:
    """A change of the topology, with its phase and progress."""

    kind: str
    #: Id of the request; empty for automatic operations.
    operation_id: str
    #: Names of the desired members.
    wanted: frozenset[str]
    #: Time at which the current phase began, in seconds.
    since: float
    phase: OperationPhase = OperationPhase.WAITING
    #: Generation to which the operation leads. None until its preparation begins.
    target: Generation | None = None
    #: Generation that the target replaces.
    previous: GenerationKey | None = None
    reason: str = ""
    #: Number of experts that ranks must receive. Each copy counts.
    moves: int = 0
    #: Size in bytes of the experts that ranks must receive.
    moved_bytes: int = 0
    rebalancing: Rebalancing | None = None
    #: Number of ranks that have not committed the target, plus the number of ranks that have not
    #: retired from the previous generation.
    num_pending: int = 0
    #: Time at which `num_pending` last changed, in seconds.
    progress_at: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.phase in ACTIVE_PHASES

    @property
    def committed(self) -> bool:
        return self.phase is OperationPhase.COMMITTING

    @property
    def label(self) -> str:
        """Id, kind and generation of the operation, for logs."""
        number = "" if self.target is None else f" to generation {self.target.number}"
        return f"operation {self.operation_id or '-'} ({self.kind}{number})"

    def enter(self, phase: OperationPhase, now: float, reason: str = "") -> None:
        self._seconds[self.phase] = now - self.since
        self.phase, self.since, self.reason = phase, now, reason

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds spent in each phase. The current phase counts until `now`."""
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
    """Return an operation that continues a commit of `target`, begun by an earlier coordinator."""
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
    """Result of an operation that has ended: outcome, durations and moved experts."""

    kind: str
    outcome: OperationPhase
    #: Duration in seconds by phase.
    seconds: dict[str, float]
    #: Number of experts that moved. 0 if the generation was not committed.
    moves: int
    #: Size in bytes of the experts that moved.
    moved_bytes: int = 0
    #: The automatic rebalance that was committed.
    rebalancing: Rebalancing | None = None


# Progress of the ranks, as functions of their statuses


def is_in(status: Status, generation: Generation) -> bool:
    """Return whether the rank that sent `status` serves in the generation, even if it is broken."""
    committed = serves_in(status)
    return committed is not None and key_of(committed) == key_of(generation)


def overtaken(roster: Roster, target: Generation) -> bool:
    """Return whether a living rank serves in a newer generation than the target.

    A generation with the same number and another nonce counts as newer. A rank in a newer
    generation ignores the target.
    """
    return any(
        generation.number >= target.number and generation.nonce != target.nonce
        for _, generation in roster.serving()
    )


def lost_members(roster: Roster, target: Generation) -> list[str]:
    """Return the names of members that are dead or otherwise unable to prepare the target."""
    return [
        member.name
        for member in target.members
        if not _can_prepare(roster.living.get(member.instance_id))
    ]


def _can_prepare(status: Status | None) -> bool:
    if status is None or status.phase is RankPhase.LOADING:
        return False
    return serves_in(status) is not None or not status.leaving


def preparation_failures(roster: Roster, target: Generation) -> dict[str, str]:
    """Return the reason of each member that could not prepare `target`, keyed by instance id."""
    statuses = (roster.living.get(member.instance_id) for member in target.members)
    return {
        status.member.instance_id: f"{status.member.name}: {status.failure or 'gave no reason'}"
        for status in statuses
        if status is not None and status.failed == target.nonce
    }


def unprepared(roster: Roster, target: Generation) -> list[TopologyMember]:
    """Return the members that have neither prepared nor committed the target generation."""
    members = []
    for member in target.members:
        status = roster.living.get(member.instance_id)
        if status is None or (status.prepared != target.nonce and not is_in(status, target)):
            members.append(member)
    return members


def not_committed(roster: Roster, target: Generation) -> list[str]:
    """Return the names of living members that have not committed the target generation."""
    statuses = (roster.living.get(member.instance_id) for member in target.members)
    return [
        status.member.name
        for status in statuses
        if status is not None and not is_in(status, target)
    ]


def not_retired(roster: Roster, operation: Operation, target: Generation) -> list[str]:
    """Return the names of ranks that serve in the previous generation and are not in the target."""
    return [
        status.member.name
        for status, generation in roster.serving()
        if key_of(generation) == operation.previous
        and target.rank_of(status.member.instance_id) is None
    ]


def commit_obstacle(roster: Roster, operation: Operation, target: Generation) -> str:
    """Return why the target's commit cannot be completed. Empty: no obstacle is known."""
    if overtaken(roster, target):
        return "a rank has committed another generation"
    for member in target.members:
        status = roster.living.get(member.instance_id)
        if status is None:
            return f"{member.name} sends no status"
        if is_in(status, target):
            if status.phase is RankPhase.BROKEN:
                return f"{member.name} reports a broken generation: {status.failure}"
        elif status.prepared != target.nonce:
            return f"{member.name} is no longer prepared for generation {target.number}"
    if target.urgent or not not_committed(roster, target):
        return ""
    # A commit that is not urgent needs the votes of all ranks of the previous generation.
    for rank in roster.ranks.values():
        generation = serves_in(rank.status)
        if generation is None or key_of(generation) != operation.previous:
            continue
        name = rank.status.member.name
        if rank.status.member.instance_id not in roster.living:
            return f"{name} sends no status, but the commit needs its vote"
        if rank.status.phase is RankPhase.BROKEN:
            return f"{name} reports a broken generation: {rank.status.failure}"
    return ""


def latest_commit(roster: Roster, present: Generation | None) -> Generation | None:
    """Return the highest generation whose commit a living rank has received.

    If no such generation has a higher number than `present`, return `present`.
    """
    commits = [each.committed for each in roster.living.values() if each.committed is not None]
    above = [each for each in commits if present is None or each.number > present.number]
    return max(above, key=key_of, default=present)


def is_partly_committed(roster: Roster, generation: Generation) -> bool:
    """Return whether all members have prepared or committed a generation, but not all committed."""
    statuses = [roster.living.get(member.instance_id) for member in generation.members]
    if not all(
        status is not None and (is_in(status, generation) or status.prepared == generation.nonce)
        for status in statuses
    ):
        return False
    return bool(not_committed(roster, generation))
