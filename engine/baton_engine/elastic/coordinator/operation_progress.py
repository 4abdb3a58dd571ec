"""Progress of the ranks with an operation's target, as functions of their statuses."""

from __future__ import annotations

from baton_engine.elastic.coordinator.operation import Operation
from baton_engine.elastic.coordinator.roster import Roster, key_of, serves_in
from baton_protocol.topology import Generation, Member, RankPhase, Status


def is_in(status: Status, generation: Generation) -> bool:
    """Return whether the rank has committed the generation."""
    committed = serves_in(status)
    return committed is not None and key_of(committed) == key_of(generation)


def overtaken(roster: Roster, target: Generation) -> bool:
    """Return whether a rank has another generation that is not older, and refuses the target."""
    return any(
        generation.number >= target.number and generation.nonce != target.nonce
        for _, generation in roster.serving()
    )


def lost_members(roster: Roster, target: Generation) -> list[str]:
    """Return the names of members that cannot prepare the target."""
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
    """Return the reasons of failed preparations, by instance id."""
    statuses = (roster.living.get(member.instance_id) for member in target.members)
    return {
        status.member.instance_id: f"{status.member.name}: {status.failure or 'gave no reason'}"
        for status in statuses
        if status is not None and status.failed == target.nonce
    }


def unprepared(roster: Roster, target: Generation) -> list[Member]:
    members = []
    for member in target.members:
        status = roster.living.get(member.instance_id)
        if status is None or (status.prepared != target.nonce and not is_in(status, target)):
            members.append(member)
    return members


def not_committed(roster: Roster, target: Generation) -> list[str]:
    """Return the names of living members that do not report the target as committed."""
    statuses = (roster.living.get(member.instance_id) for member in target.members)
    return [
        status.member.name
        for status in statuses
        if status is not None and not is_in(status, target)
    ]


def not_retired(roster: Roster, operation: Operation, target: Generation) -> list[str]:
    """Return the names of ranks outside the target that still have the previous generation."""
    return [
        status.member.name
        for status, generation in roster.serving()
        if key_of(generation) == operation.previous
        and target.rank_of(status.member.instance_id) is None
    ]


def commit_obstacle(roster: Roster, operation: Operation, target: Generation) -> str:
    """Return why the commit cannot be completed; empty if no obstacle is known."""
    if overtaken(roster, target):
        return "a rank has committed another generation"
    for member in target.members:
        status = roster.living.get(member.instance_id)
        if status is None:
            return f"{member.name} sends no status"
        if is_in(status, target):
            if status.phase is RankPhase.BROKEN:
                return f"{member.name} lost its group: {status.failure}"
        elif status.prepared != target.nonce:
            return f"{member.name} has lost its preparation"
    if target.urgent or not not_committed(roster, target):
        return ""
    # All ranks of the previous generation have to vote.
    for rank in roster.ranks.values():
        generation = serves_in(rank.status)
        if generation is None or key_of(generation) != operation.previous:
            continue
        name = rank.status.member.name
        if rank.status.member.instance_id not in roster.living:
            return f"{name} sends no status, and its vote is needed"
        if rank.status.phase is RankPhase.BROKEN:
            return f"{name} lost its group: {rank.status.failure}"
    return ""


def latest_commit(roster: Roster, present: Generation | None) -> Generation | None:
    """Return the highest generation whose commit a living rank has received."""
    commits = [each.committed for each in roster.living.values() if each.committed is not None]
    above = [each for each in commits if present is None or each.number > present.number]
    return max(above, key=key_of, default=present)


def is_partly_committed(roster: Roster, generation: Generation) -> bool:
    """Return whether some members have not committed, and all of those are prepared."""
    statuses = [roster.living.get(member.instance_id) for member in generation.members]
    if not all(
        status is not None and (is_in(status, generation) or status.prepared == generation.nonce)
        for status in statuses
    ):
        return False
    return bool(not_committed(roster, generation))
