"""How far the ranks are with an operation's target, and what stands in its way. Functions of their statuses."""

from __future__ import annotations

from baton_engine.elastic.coordinator.operation import Operation
from baton_engine.elastic.coordinator.roster import Roster, key_of, serves_in
from baton_protocol.topology import Generation, Member, RankPhase, Status


def is_in(status: Status, generation: Generation) -> bool:
    """The rank has adopted it."""
    adopted = serves_in(status)
    return adopted is not None and key_of(adopted) == key_of(generation)


def overtaken(roster: Roster, target: Generation) -> bool:
    """A rank has a generation that is not older than this one: it refuses the target."""
    return any(
        generation.number >= target.number and generation.nonce != target.nonce
        for _, generation in roster.serving()
    )


def lost_members(roster: Roster, target: Generation) -> list[str]:
    """Names of members that cannot prepare it."""
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
    """Instance id -> the reason it gave."""
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
    """Names of members that live and do not report it."""
    statuses = (roster.living.get(member.instance_id) for member in target.members)
    return [
        status.member.name
        for status in statuses
        if status is not None and not is_in(status, target)
    ]


def not_retired(roster: Roster, operation: Operation, target: Generation) -> list[str]:
    """Names of ranks that still have the generation that the target replaces, and are not of the target."""
    return [
        status.member.name
        for status, generation in roster.serving()
        if key_of(generation) == operation.previous
        and target.rank_of(status.member.instance_id) is None
    ]


def commit_obstacle(roster: Roster, operation: Operation, target: Generation) -> str:
    """Why the commit cannot be completed; empty: it can, as far as can be seen."""
    if overtaken(roster, target):
        return "a rank has adopted another generation"
    for member in target.members:
        status = roster.living.get(member.instance_id)
        if status is None:
            return f"{member.name} does not answer"
        if is_in(status, target):
            if status.phase is RankPhase.BROKEN:
                return f"{member.name} lost the others: {status.failure}"
        elif status.prepared != target.nonce:
            return f"{member.name} has lost what it prepared"
    if target.urgent or not not_committed(roster, target):
        return ""
    # The generation before it has to vote, all of it.
    for rank in roster.ranks.values():
        generation = serves_in(rank.status)
        if generation is None or key_of(generation) != operation.previous:
            continue
        name = rank.status.member.name
        if rank.status.member.instance_id not in roster.living:
            return f"{name} does not answer, whose vote is needed"
        if rank.status.phase is RankPhase.BROKEN:
            return f"{name} lost the others: {rank.status.failure}"
    return ""


def shown(roster: Roster, present: Generation | None) -> Generation | None:
    """The highest generation that a living rank has adopted or was told to adopt."""
    told = [status.committed for status in roster.living.values() if status.committed is not None]
    above = [each for each in told if present is None or each.number > present.number]
    return max(above, key=key_of, default=present)


def is_partly_committed(roster: Roster, generation: Generation) -> bool:
    """Some members do not have it yet, and all of those have it prepared."""
    statuses = [roster.living.get(member.instance_id) for member in generation.members]
    if not all(
        status is not None and (is_in(status, generation) or status.prepared == generation.nonce)
        for status in statuses
    ):
        return False
    return bool(not_committed(roster, generation))
