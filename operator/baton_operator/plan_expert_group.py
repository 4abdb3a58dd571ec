"""What to do next with the members of an expert-parallel group: which pods to make, which topology to ask the coordinator
for, whom to delete. Pure: no client and no clock.

A member joins when its container has started: the coordinator is asked for a topology with it. It leaves in the opposite order:
the coordinator is asked for a topology without it; when it stands by it is marked as draining, and deleted when nothing is
unfinished. While a topology is being prepared or committed, and while the coordinator does not answer, nobody is deleted but pods
that failed. A new revision is rolled out as the update strategy says: with a surge its pods join first, then outdated ones leave;
a pod that no node has room for takes the place of an outdated one after a while.

No topology is without members. So the last rank of a group that is scaled to zero drains as a rank, when the others have gone.
Pods of another expert group (another model, say) can be in no topology with the new ones: when a new pod has started, the others
are scaled to zero, then the new group is formed. Decode pods that were engines of their own drain like any engine. When decode pods
are to be engines of their own, ranks leave as these become ready.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from baton_engine.protocol.topology import TopologyRequest, TopologyStatus
from baton_operator import api, names
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.plan import (
    FAILED_HOLD,
    POLL_DRAIN_S,
    STUCK_TERMINATING,
    Delete,
    GroupPlan,
    Member,
    Update,
    may_go,
    plan_group,
    update_of,
    waits_for_room,
)
from baton_operator.topology import ACTIVE, TopologyView

REVISIT_S = 1.0
JOIN_TOGETHER = timedelta(seconds=30)
"""Members that have started wait so long for others that were made with them, to join in one operation."""
UNREGISTERED = timedelta(seconds=10)
"""A rank's process that has started registers at once, with a new coordinator, too. Whoever has not done so since it was marked as
draining, for so long, is no member."""


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What an expert-parallel group should be, and what is known of its topology."""

    service_uid: str
    name: str
    """Of pods that can be in one topology. Empty: members are to be engines of their own, and ranks leave."""
    desired: int
    revision: str
    topology: TopologyStatus | None
    """None: the coordinator did not answer."""
    recorded: api.TopologyStatus | None = None
    """As the status of the service says."""
    drain_timeout_s: float
    update: Update = Update()


class ExpertGroupPlan(GroupPlan, frozen=True, kw_only=True):
    """The next step of an expert-parallel group."""

    request: TopologyRequest | None = None
    """For the coordinator."""

    @property
    def acts(self) -> bool:
        return super().acts or self.request is not None


def plan_members(
    owner: Owner,
    role: names.MemberRole,
    template: MemberTemplate,
    members: list[Member],
    now: datetime,
    *,
    topology: TopologyStatus | None,
    recorded: api.TopologyStatus | None,
    has_coordinator: bool,
    has_former: bool,
) -> GroupPlan:
    """The next step of a group of either kind. It is planned as ranks while it has ranks that a coordinator can let leave.

    Args:
        topology, recorded, has_former: see `ExpertGroup` and `plan_group`.
    """
    size, drain_timeout_s = owner.replicas(role), float(owner.spec.drain_timeout_seconds)
    update = update_of(owner, role)
    if not (template.expert_group or (has_coordinator and any(m.expert_group for m in members))):
        return plan_group(
            members,
            desired=size,
            revision=template.revision,
            update=update,
            drain_timeout_s=drain_timeout_s,
            now=now,
            has_former=has_former,
        )
    group = ExpertGroup(
        service_uid=owner.uid,
        name=template.expert_group,
        desired=size,
        revision=template.revision,
        topology=topology,
        recorded=recorded,
        drain_timeout_s=drain_timeout_s,
        update=update,
    )
    return plan_expert_group(members, group, now)


def plan_expert_group(members: list[Member], group: ExpertGroup, now: datetime) -> ExpertGroupPlan:
    """The next step towards `group.desired` ranks of `group.revision`."""
    alive = [m for m in members if m.deletion is None or now < m.deletion + STUCK_TERMINATING]
    failed = [m for m in alive if m.deletion is None and m.failed]
    held = [m for m in failed if m.created is not None and now < m.created + FAILED_HOLD]
    view = TopologyView(group.topology, group.recorded) if group.topology is not None else None
    room_in_s = waits_for_room([m for m in alive if _is_newest(m, group)], group.update, now)
    may_lack = max(group.update.max_unavailable, 1 if room_in_s == 0 else 0)
    staying, leaving, current = _divide(alive, group, view, may_lack)

    create = _create(members, alive, staying, len(current) + len(held), group)
    delete = [Delete(m.name, "it failed") for m in failed if m not in held]
    waits = [REVISIT_S] if leaving else []
    if held:
        waits.append(FAILED_HOLD.total_seconds())
    if room_in_s:
        waits.append(room_in_s)
    if view is None:
        if not group.name:
            delete += [Delete(m.name, "it had not started") for m in leaving if m.expert_group and not m.serving]
        return ExpertGroupPlan(create=create, delete=delete, revisit_s=REVISIT_S)
    wanted = _wanted(alive, staying, leaving, group.name, view, now)
    request = _request(wanted, group, view)
    last = _last_ranks(alive, staying, view)
    drain = []
    for member in leaving:
        if member.expert_group and member not in last and not _has_left(member, staying, view):
            continue
        why = _may_go(member, last, group.drain_timeout_s, view, now)
        if why:
            delete.append(Delete(member.name, why))
        elif (member.serving or member in last) and member.drain_started is None:
            drain.append(member.name)
        if member.draining or member.name in drain:
            waits.append(POLL_DRAIN_S)
    if alive and (wanted != view.desired or _is_under_way(view, staying, group.name)):
        waits.append(REVISIT_S)
    return ExpertGroupPlan(
        create=create, drain=drain, delete=delete, request=request, revisit_s=min(waits, default=None)
    )


def operation_id(group: ExpertGroup, wanted: list[str], topology: TopologyStatus) -> str:
    """Follows from what is observed, so it is the same after a crash.

    It names where the operation begins, too: the generation, and the operation before it. So when the same members are asked for
    again, after others, that is another operation.
    """
    before = topology.operation.operation_id if topology.operation else ""
    return names.content_hash([group.service_uid, topology.generation, before, wanted])


def _is_newest(m: Member, group: ExpertGroup) -> bool:
    usable = m.deletion is None and not m.failed and not m.draining
    return usable and (group.update.paused or m.revision == group.revision) and m.expert_group == group.name


def _divide(
    alive: list[Member], group: ExpertGroup, view: TopologyView | None, may_lack: int
) -> tuple[list[Member], list[Member], list[Member]]:
    """Who stays for now, who leaves, and who of those that stay are up to date.

    Args:
        may_lack: ranks of which the group may be short while members are replaced.
    """
    able = [m for m in alive if m.deletion is None and not m.failed]
    usable = [m for m in able if not m.draining]

    def rank(m: Member) -> tuple[bool, bool, bool, int]:
        asked_for, is_rank = (m.name in view.desired, view.is_rank(m.name)) if view else (False, False)
        return asked_for, is_rank, m.serving, -m.ordinal

    newest = [m for m in usable if _is_newest(m, group)]
    # A pause keeps even the members that were made to surge.
    surplus = group.update.max_surge if group.update.paused and len({m.revision for m in newest}) > 1 else 0
    current = sorted(newest, key=rank, reverse=True)[: group.desired + surplus]
    # Another group goes when a pod of this one has started, so that a revision that cannot start takes nobody's place.
    others = sorted((m for m in usable if _is_of_another(m, group.name)), key=rank, reverse=True)
    outdated = [m for m in usable if m not in newest and m not in others]
    if group.name:
        num_others = 0 if any(m.serving for m in current) else group.desired - may_lack
    else:  # engines of their own serve at once, so that ranks leave as they become ready
        num_others = group.desired - may_lack - sum(m.ready for m in current)
        others = [m for m in others if m.serving]
    kept_others = others[: max(0, num_others)]
    serving = sum(view.serves(m.name) for m in current) if view else 0
    ranked = sorted(outdated, key=lambda m: (view.serves(m.name) if view else False, m.ready, -m.ordinal), reverse=True)
    kept = ranked[: max(0, group.desired - may_lack - serving - len(kept_others))]
    staying = [*current, *kept, *kept_others]
    return staying, [m for m in able if m not in staying], current


def _create(
    members: list[Member], alive: list[Member], staying: list[Member], num_current: int, group: ExpertGroup
) -> list[int]:
    """Ordinals. If nobody stays one is made however many leave: they leave only when a topology without them can be."""
    desired = group.desired
    rolling = any(not _is_newest(m, group) for m in alive)
    room = max(desired + (group.update.max_surge if rolling else 0) - len(alive), 0 if staying else 1)
    in_use = {m.ordinal for m in members}
    free = (ordinal for ordinal in range(len(in_use) + desired) if ordinal not in in_use)
    return [next(free) for _ in range(min(desired - num_current, room))]


def _wanted(
    alive: list[Member],
    staying: list[Member],
    leaving: list[Member],
    group: str,
    view: TopologyView,
    now: datetime,
) -> frozenset[str]:
    """Names of the topology that should be."""
    if any(_is_of_another(m, group) for m in alive):  # it goes on until a pod of this one has started, and goes first
        candidates = [m for m in staying if _is_of_another(m, group)]
    else:
        candidates = [m for m in staying if group and m.expert_group == group]
    joined = {m.name for m in candidates if m.name in view.desired or view.is_rank(m.name)}
    started = {m.name for m in candidates if m.serving and m.name not in joined}
    late = [m for m in candidates if not m.serving and m.name not in joined]
    if any(m.created is not None and now < m.created + JOIN_TOGETHER for m in late):
        started = set()
    if joined | started:
        return frozenset(joined | started)
    if any(m.no_room_since is None for m in candidates):
        return view.desired  # who leaves serves until they have started
    # There are none, or they wait for the room of those that leave: these go, down to the last rank.
    ranks = sorted((m for m in leaving if view.is_rank(m.name)), key=lambda m: (m.draining, m.ordinal))
    return frozenset(m.name for m in ranks[:1]) or view.desired


def _request(wanted: frozenset[str], group: ExpertGroup, view: TopologyView) -> TopologyRequest | None:
    """None: that is asked for already, or has to wait."""
    if wanted == view.desired:
        return None
    if view.is_changing and view.desired and wanted > view.desired:
        return None  # who only joins does not undo what is under way
    members = sorted(wanted)
    return TopologyRequest(operation_id=operation_id(group, members, view.topology), members=members)


def _last_ranks(alive: list[Member], staying: list[Member], view: TopologyView) -> list[Member]:
    """The only rank that is left, or all if no container of them runs, if their group is to end."""
    ranks = [m for m in alive if view.is_rank(m.name)]
    is_running = len(ranks) > 1 and any(m.serving for m in ranks)
    if is_running or view.is_changing or any(m in staying for m in ranks):
        return []
    # One that waits for room may be waiting for this very place.
    groups = {m.expert_group for m in ranks}
    return [] if any(m.expert_group in groups and m.no_room_since is None for m in staying) else ranks


def _has_left(member: Member, staying: list[Member], view: TopologyView) -> bool:
    """The member is in no topology, and in none that is being prepared or was asked for."""
    if view.is_changing or view.is_rank(member.name):
        return False
    if member.name in view.desired and any(m.expert_group for m in staying):
        return False
    return view.stands_by(member.name) or not view.knows(member.name) or not member.serving


def _may_go(member: Member, last: list[Member], drain_timeout_s: float, view: TopologyView, now: datetime) -> str:
    """Why a member that has left may be deleted now; empty: not yet."""
    if not member.serving and member not in last:
        return "it had not started"
    if not member.draining:
        return ""
    # A rank whose container is down may be restarting.
    unsure = member.expert_group and not (member.serving and view.knows(member.name))
    if unsure and (member.drain_started is None or now < member.drain_started + UNREGISTERED):
        return ""
    return may_go(member, drain_timeout_s, now)


def _is_of_another(member: Member, group: str) -> bool:
    return member.expert_group not in ("", group)


def _is_under_way(view: TopologyView, staying: list[Member], group: str) -> bool:
    if view.operation is not None and view.operation.phase in ACTIVE:
        return True
    return bool(staying) and (
        view.ranks != view.desired or any(m.expert_group == group and m.name not in view.desired for m in staying)
    )
