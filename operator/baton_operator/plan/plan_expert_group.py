"""Plan the next step of an expert-parallel group: pods, topology requests and deletions. Pure.

A member joins the group after its container has started: the operator then sends the coordinator a
request for a topology that contains the member.

A member leaves in three steps, each of which is observed before the next one begins:

1. A topology without the member is requested.
2. When the member is outside the topology, it is marked as draining.
3. When the member has no unfinished request or transfer, it is deleted.

Only failed pods are deleted while a topology is being prepared or committed, and while the
coordinator does not reply.

A rollout follows the update strategy. With a surge, new pods join before outdated pods leave. If a
new pod fits on no node, an outdated pod leaves after `surge_timeout_s` to make room.

Four cases are special:

- Scale to zero: a topology has at least one member. So the last rank stays in the topology, and
  drains once all other ranks are deleted.
- A new expert group, for example after a change of the model: ranks of different expert groups
  cannot share a topology. When a new pod has started, the old group is scaled to zero, and then the
  new group is formed.
- From independent engines to ranks: the engines drain as `plan_group` describes.
- From ranks to independent engines: ranks leave as the engines become ready.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from baton_operator import names
from baton_operator.plan.plan_group import (
    POLL_DRAIN_S,
    Delete,
    DesiredGroup,
    GroupPlan,
    Member,
    deletion_reason,
    free_ordinals,
    plan_failed,
    present_members,
    surge_timeout_of,
)
from baton_operator.plan.topology_view import TopologyView
from baton_protocol.topology import ACTIVE_PHASES, TopologyRequest, TopologyStatus

#: Seconds between reconciles while members leave or the topology changes. No watch event reports
#: this progress.
REVISIT_S = 1.0
#: New members that have started wait for a new member that has not started, until that member
#: reaches this age. All of them then join in one operation.
JOIN_TOGETHER = timedelta(seconds=30)
#: A running rank registers with its coordinator at once. A pod that has not registered this long
#: after the start of its drain is not a member of the topology.
UNREGISTERED = timedelta(seconds=10)


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of an expert-parallel group, and its observed topology."""

    target: DesiredGroup
    service_uid: str
    #: Id of the expert group of the newest members. Empty: the newest members are independent
    #: engines, and all ranks leave.
    name: str
    view: TopologyView | None  #: None: the coordinator did not reply.


class _Division(NamedTuple):
    """Which members stay and which leave. Members that failed or are being deleted are left out."""

    current: list[Member]  # of the newest revision, and needed
    kept: list[Member]  # of another revision or expert group, and still needed
    leaving: list[Member]

    @property
    def staying(self) -> list[Member]:
        return [*self.current, *self.kept]


def plan_expert_group(members: list[Member], group: ExpertGroup, now: datetime) -> GroupPlan:
    """Return the next step towards `group.target.size` members of `group.target.revision`."""
    present = present_members(members, now)
    delete, revisits_s = plan_failed(present, now)
    num_failed = sum(m.failed and m.deletion is None for m in present) - len(delete)
    view, update = group.view, group.target.update
    newest = [m for m in present if _is_newest(m, group)]
    surge_timeout = surge_timeout_of(newest, update, now)
    max_unavailable = max(update.max_unavailable, 1 if surge_timeout.has_passed else 0)
    division = _divide(present, group, view, max_unavailable)
    staying, leaving = division.staying, division.leaving

    create = _ordinals_to_create(
        members, present, staying, len(division.current) + num_failed, group
    )
    if view is None:
        return _plan_without_view(create, delete, leaving, group)
    if surge_timeout.left_s is not None:
        revisits_s.append(surge_timeout.left_s)
    if leaving:
        revisits_s.append(REVISIT_S)
    desired = _desired_members(present, staying, leaving, group.name, view, now)
    request = _topology_request(desired, group, view)
    last = _last_ranks(present, staying, view)
    drain = []
    for member in leaving:
        if member.expert_group and member not in last and not _has_left(member, staying, view):
            continue  # the member is still in a topology
        why = _deletion_reason_outside_topology(
            member, last, group.target.drain_timeout_s, view, now
        )
        if why:
            delete.append(Delete(member.name, why))
        elif (member.started or member in last) and member.drain_started is None:
            drain.append(member.name)
        if member.draining or member.name in drain:
            revisits_s.append(POLL_DRAIN_S)
    if present and (desired != view.desired or _is_under_way(view, staying, group.name)):
        revisits_s.append(REVISIT_S)
    return GroupPlan(
        create=create,
        drain=drain,
        delete=delete,
        request=request,
        revisit_s=min(revisits_s, default=None),
    )


def operation_id(group: ExpertGroup, desired: list[str], topology: TopologyStatus) -> str:
    """Return the operation id of a topology request for the members `desired`.

    The id is a hash of the observed state, so it stays the same after a restart of the operator.
    The hash includes the generation of the topology and the id of the previous operation. So a
    later request for the same members has another id.
    """
    before = topology.operation.operation_id if topology.operation else ""
    return names.content_hash([group.service_uid, topology.generation, before, desired])


def _plan_without_view(
    create: list[int], delete: list[Delete], leaving: list[Member], group: ExpertGroup
) -> GroupPlan:
    """Return the next step if the coordinator did not reply.

    No topology is requested, and no member drains. If independent engines replace the ranks, ranks
    that have not started are deleted.

    Args:
        create: ordinals of members to create.
        delete: deletions of failed members.
        leaving: members that should leave.
    """
    if not group.name:
        delete = delete + [
            Delete(m.name, "it had not started")
            for m in leaving
            if m.expert_group and not m.started
        ]
    return GroupPlan(create=create, delete=delete, revisit_s=REVISIT_S)


def _is_newest(m: Member, group: ExpertGroup) -> bool:
    """Return whether the member has the newest revision and expert group, and is not leaving.

    In a pause, every revision counts as newest.
    """
    stays = m.deletion is None and not m.failed and not m.draining
    return (
        stays
        and (group.target.update.paused or m.revision == group.target.revision)
        and m.expert_group == group.name
    )


def _divide(
    present: list[Member], group: ExpertGroup, view: TopologyView | None, max_unavailable: int
) -> _Division:
    """Decide which members stay and which leave.

    Args:
        max_unavailable: while members are replaced, the number of serving members may be this much
            below the desired size.
    """
    size, update = group.target.size, group.target.update
    usable = [m for m in present if m.deletion is None and not m.failed]
    not_draining = [m for m in usable if not m.draining]
    newest = _by_membership([m for m in not_draining if _is_newest(m, group)], view)
    ranks_of_other_groups = _by_membership(
        [m for m in not_draining if _is_rank_of_other_group(m, group.name)], view
    )
    outdated = sorted(
        (m for m in not_draining if m not in newest and m not in ranks_of_other_groups),
        key=lambda m: (not _serves(m, view), not m.ready, m.ordinal),
    )

    # A pause keeps even the members that were created to surge.
    keeps_surge = update.paused and len({m.revision for m in newest}) > 1
    current = newest[: size + (update.max_surge if keeps_surge else 0)]
    num_needed = max(0, size - max_unavailable)
    num_serving = sum(_serves(m, view if group.name else None) for m in current)
    if not group.name:  # ranks leave as the independent engines that replace them become ready
        serving = [m for m in ranks_of_other_groups if m.started]
        kept = serving[: max(0, num_needed - num_serving)]
    else:
        # The old group leaves only when a pod of the new group has started, so a revision that
        # cannot start replaces no rank.
        has_started = any(m.started for m in current)
        kept = [] if has_started else ranks_of_other_groups[:num_needed]
    kept += outdated[: max(0, num_needed - num_serving - len(kept))]
    return _Division(current, kept, [m for m in usable if m not in current and m not in kept])


def _by_membership(members: list[Member], view: TopologyView | None) -> list[Member]:
    """Return the members in the order in which they should be kept.

    Members of the requested topology come before other members. In each of these two parts, ranks
    come first, then started members, then members with low ordinals.
    """
    requested, ranks = (view.desired, view.ranks) if view else (frozenset(), frozenset())
    return sorted(
        members,
        key=lambda m: (m.name not in requested, m.name not in ranks, not m.started, m.ordinal),
    )


def _serves(member: Member, view: TopologyView | None) -> bool:
    """Return whether the member serves as a rank; if `view` is None, whether its pod is ready."""
    return view.serves(member.name) if view else member.ready


def _ordinals_to_create(
    members: list[Member],
    present: list[Member],
    staying: list[Member],
    num_current: int,
    group: ExpertGroup,
) -> list[int]:
    """Return the ordinals of members to create.

    If no member stays, one member is created even if no surge is allowed. Ranks can leave
    only when a topology without them exists, and a topology has at least one member.
    """
    size, update = group.target.size, group.target.update
    is_rollout = any(not _is_newest(m, group) for m in present)
    room = size + (update.max_surge if is_rollout else 0) - len(present)
    return free_ordinals(members, min(size - num_current, max(room, 0 if staying else 1)))


def _desired_members(
    present: list[Member],
    staying: list[Member],
    leaving: list[Member],
    expert_group: str,
    view: TopologyView,
    now: datetime,
) -> frozenset[str]:
    """Return the names of the members that the topology should have.

    Args:
        expert_group: `ExpertGroup.name`.
    """
    # Ranks of different expert groups cannot share a topology. The old group serves until it is
    # scaled to zero.
    if any(_is_rank_of_other_group(m, expert_group) for m in present):
        candidates = [m for m in staying if _is_rank_of_other_group(m, expert_group)]
    else:
        candidates = [m for m in staying if expert_group and m.expert_group == expert_group]
    joined = {m.name for m in candidates if m.name in view.desired or view.is_rank(m.name)}
    started = {m.name for m in candidates if m.started and m.name not in joined}
    not_started = [m for m in candidates if not m.started and m.name not in joined]
    if any(m.created is not None and now < m.created + JOIN_TOGETHER for m in not_started):
        started = set()
    if joined | started:
        return frozenset(joined | started)
    if any(m.no_room_since is None for m in candidates):
        return view.desired  # leaving ranks serve until the candidates have started
    # Either there are no candidates, or leaving ranks occupy the nodes that the candidates need.
    # All ranks except one leave.
    ranks = sorted(
        (m for m in leaving if view.is_rank(m.name)), key=lambda m: (m.draining, m.ordinal)
    )
    return frozenset(m.name for m in ranks[:1]) or view.desired


def _topology_request(
    desired: frozenset[str], group: ExpertGroup, view: TopologyView
) -> TopologyRequest | None:
    """Return the topology request to send now.

    The result is None if the topology `desired` was requested already, or if new members must wait
    for the end of the running operation.
    """
    if desired == view.desired:
        return None
    if view.is_changing and view.desired and desired > view.desired:
        return None  # new members wait for the end of the running operation
    members = sorted(desired)
    return TopologyRequest(
        operation_id=operation_id(group, members, view.topology), members=members
    )


def _last_ranks(present: list[Member], staying: list[Member], view: TopologyView) -> list[Member]:
    """Return the ranks that drain although they are in the topology.

    A topology has at least one member, so the last rank of a group that is scaled to zero cannot
    leave the topology.

    Returns:
        Empty if the topology changes, if a rank stays, or if a staying member can take the place of
        the last rank. Also empty if there are several ranks and one has started. Otherwise: all
        ranks.
    """
    if view.is_changing:
        return []
    ranks = [m for m in present if view.is_rank(m.name)]
    if any(m in staying for m in ranks):
        return []
    if len(ranks) > 1 and any(m.started for m in ranks):
        return []
    groups = {m.expert_group for m in ranks}
    successors = [m for m in staying if m.expert_group in groups]
    # A successor that fits on no node may wait for the resources of the last rank.
    if any(m.no_room_since is None for m in successors):
        return []
    return ranks


def _has_left(member: Member, staying: list[Member], view: TopologyView) -> bool:
    """Return whether the member is outside the topology, and no operation can add it.

    A started member that is registered must also be in phase LOADING or STANDBY.
    """
    if view.is_changing or view.is_rank(member.name):
        return False
    if member.name in view.desired and any(m.expert_group for m in staying):
        return False
    return view.is_standby(member.name) or not view.is_registered(member.name) or not member.started


def _deletion_reason_outside_topology(
    member: Member, last: list[Member], drain_timeout_s: float, view: TopologyView, now: datetime
) -> str:
    """Return why a member may be deleted now; empty if it must stay.

    Args:
        member: a member outside the topology, or one of `last`.
        last: the ranks that drain although they are in the topology, from `_last_ranks`.
    """
    if not member.started and member not in last:
        return "it had not started"
    if not member.draining:
        return ""
    # A rank that does not run, or has not registered, may be restarting.
    may_restart = member.expert_group and not (member.started and view.is_registered(member.name))
    if may_restart and (member.drain_started is None or now < member.drain_started + UNREGISTERED):
        return ""
    return deletion_reason(member, drain_timeout_s, now)


def _is_rank_of_other_group(member: Member, expert_group: str) -> bool:
    """Return whether the member is a rank, and its expert group is not `expert_group`."""
    return member.expert_group not in ("", expert_group)


def _is_under_way(view: TopologyView, staying: list[Member], expert_group: str) -> bool:
    """Return whether a change of the topology is running or still necessary."""
    if view.operation is not None and view.operation.phase in ACTIVE_PHASES:
        return True
    return bool(staying) and (
        view.ranks != view.desired
        or any(m.expert_group == expert_group and m.name not in view.desired for m in staying)
    )
