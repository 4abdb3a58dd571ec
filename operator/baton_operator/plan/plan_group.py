"""Plan the next step of one group of independent engines. Pure: no client and no clock.

A member is one pod of the group. It leaves in three steps, each of which is observed in the cluster
before the next one begins:

1. The member is marked as draining, so gateways send it no new requests.
2. The member drains until it has no unfinished request or transfer, or the drain timeout passes
   (`reconcile/drain.py`).
3. The member is deleted.

A rollout replaces members of an earlier revision within two bounds:

- At most `desired + max_surge` members exist, including members that leave.
- At least `desired - max_unavailable` members are ready.

So if a new revision never becomes ready, its rollout stops at the second bound, and the other
members keep serving.

If a new member fits on no node, an old member leaves after `surge_timeout_s` to make room.

If another client deletes a member and a surge is allowed, the replacement is created immediately.
Without a surge, it is created when the deleted pod is gone. The replacement has the newest
revision, except during a pause and while a member of the newest revision has missed its progress
deadline. It then has the previous revision, which is the last one with which the whole service was
ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import count, islice
from typing import NamedTuple

import msgspec

from baton_protocol.topology import TopologyRequest

#: A pod that still exists this long after its grace period is on a lost node, and is ignored.
STUCK_TERMINATING = timedelta(seconds=30)
#: Interval of `POST /drain` requests to a draining member. No watch event reports its progress.
POLL_DRAIN_S = 0.5
#: Minimum age at which a failed member is deleted. It limits how often a pod that fails at its
#: start is created again.
FAILED_HOLD = timedelta(seconds=10)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state of one member: a prefill or decode pod."""

    name: str
    ordinal: int
    revision: str
    ready: bool = False
    failed: bool = False  # phase Failed or Succeeded: the containers will not run again
    started: bool = False  # the startup probe has passed, so the member may have requests
    draining: bool = False
    drain_started: datetime | None = None
    #: Number of unfinished requests and transfers in the reply to POST /drain. None: no reply.
    unfinished: int | None = None
    deletion: datetime | None = None  # end of the grace period; None: it is not being deleted
    created: datetime | None = None
    #: Time from which the progress deadline is counted: the latest of its creation, its scheduling,
    #: its last change of readiness and its last pause or sleep. None: it is ready.
    unready_since: datetime | None = None
    expert_group: str = ""  # ranks with the same value can share a topology; empty: no rank
    #: Since when the pod has been unschedulable only because other pods use the resources.
    no_room_since: datetime | None = None

    @property
    def must_drain(self) -> bool:
        """Whether to send `POST /drain` to the member."""
        return self.draining and self.started and self.deletion is None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout replaces members of an earlier revision (`spec.updateStrategy`).

    No member is replaced if `max_surge` and `max_unavailable` are both 0.
    """

    max_surge: int = 1
    max_unavailable: int = 0
    #: Seconds after which an old member makes room for a new one that fits on no node.
    surge_timeout_s: float = 30.0
    #: Seconds after which a new member that is not ready stalls the rollout.
    progress_deadline_s: float = 600.0
    paused: bool = False  # members of earlier revisions are not replaced


class DesiredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one group."""

    size: int  # number of members
    revision: str  # newest revision
    update: Update = Update()
    drain_timeout_s: float


class Delete(msgspec.Struct, frozen=True):
    """A member to delete, and the reason for its Event."""

    name: str
    why: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step of one group.

    The operator and `baton plan` take the actions in the order of these fields.
    """

    #: Topology to request from the coordinator. Only expert-parallel groups have one.
    request: TopologyRequest | None = None
    drain: list[str] = []  # members to mark as draining
    delete: list[Delete] = []
    create: list[int] = []  # ordinals
    restore: list[int] = []  # ordinals of members to create with the previous revision
    #: Plan again after this many seconds, because a change without a watch event is expected.
    revisit_s: float | None = None

    @property
    def acts(self) -> bool:
        """Whether the plan requests a topology, or drains, deletes or creates members."""
        return self.request is not None or bool(
            self.create or self.restore or self.drain or self.delete
        )


class Timeout(NamedTuple):
    """The state of a surge timeout or a progress deadline.

    A surge timeout runs only while a new member fits on no node. A progress deadline runs only
    while a new member is not ready.
    """

    has_passed: bool = False
    #: Seconds until the timeout passes. None: it has passed, or does not run.
    left_s: float | None = None


class _Group(NamedTuple):
    """The inputs for planning the next step of one group.

    A member stays if it is not marked as draining, has not failed and is not being deleted.
    """

    target: DesiredGroup
    present: list[Member]  # all members, except those stuck in termination on a lost node
    draining: list[Member]  # marked as draining, and neither failed nor being deleted
    current: list[Member]  # staying members of the newest revision; in a pause, of any revision
    outdated: list[Member]  # staying members of earlier revisions; in a pause, none
    progress_deadline: Timeout  # for members in `current` that are not ready
    surge_timeout: Timeout  # for members in `current` that fit on no node


def plan_group(
    members: list[Member],
    target: DesiredGroup,
    now: datetime,
    *,
    has_previous_revision: bool = False,
) -> GroupPlan:
    """Return the next step towards `target.size` members of `target.revision`.

    Args:
        has_previous_revision: whether members of a previous revision can be created.
    """
    group = _divide(members, target, now, has_previous_revision=has_previous_revision)
    to_remove = _members_to_remove(group)
    # If another client marked a member, drain_started is missing, and the member is marked again.
    unmarked = [m for m in group.draining if m.drain_started is None]
    drain = [m.name for m in [*unmarked, *to_remove] if m.started]
    delete, revisits_s = plan_failed(group.present, now)
    delete += [
        Delete(m.name, why)
        for m in group.draining
        if (why := deletion_reason(m, target.drain_timeout_s, now))
    ]
    delete += [Delete(m.name, "it had not started") for m in to_remove if not m.started]
    revisits_s += [
        timeout.left_s
        for timeout in (group.progress_deadline, group.surge_timeout)
        if timeout.left_s is not None
    ]
    if group.draining or drain:
        revisits_s.append(POLL_DRAIN_S)

    use_previous = has_previous_revision and (
        target.update.paused or group.progress_deadline.has_passed
    )
    ordinals = free_ordinals(members, _num_to_create(group, use_previous=use_previous))
    return GroupPlan(
        create=[] if use_previous else ordinals,
        restore=ordinals if use_previous else [],
        drain=drain,
        delete=delete,
        revisit_s=min(revisits_s, default=None),
    )


def _divide(
    members: list[Member], target: DesiredGroup, now: datetime, *, has_previous_revision: bool
) -> _Group:
    """Divide the members into draining, current and outdated ones, and compute the timeouts."""
    update = target.update
    present = present_members(members, now)
    usable = [m for m in present if m.deletion is None and not m.failed]
    staying = [m for m in usable if not m.draining]
    current = [m for m in staying if update.paused or m.revision == target.revision]
    outdated = [m for m in staying if m not in current]
    progress_deadline = surge_timeout = Timeout()
    # Without a previous revision, the plan is the same before and after the progress deadline.
    if has_previous_revision and not update.paused:
        times = [(m.unready_since, m.no_room_since) for m in current]
        progress_deadline = progress_deadline_of(times, update.progress_deadline_s, now)
    if outdated and not progress_deadline.has_passed:
        surge_timeout = surge_timeout_of(current, update, now)
    draining = [m for m in usable if m.draining]
    return _Group(target, present, draining, current, outdated, progress_deadline, surge_timeout)


def present_members(members: list[Member], now: datetime) -> list[Member]:
    """Return the members except those that are stuck in termination on a lost node."""
    return [m for m in members if m.deletion is None or now < m.deletion + STUCK_TERMINATING]


def plan_failed(present: list[Member], now: datetime) -> tuple[list[Delete], list[float]]:
    """Return (failed members to delete now, seconds until the next plan).

    A failed member is deleted no earlier than FAILED_HOLD after its creation. The second list has
    one item if a failed member is not that old yet. Otherwise it is empty.
    """
    failed = [m for m in present if m.failed and m.deletion is None]
    old = [m for m in failed if m.created is None or now >= m.created + FAILED_HOLD]
    revisits_s = [FAILED_HOLD.total_seconds()] if len(old) < len(failed) else []
    return [Delete(m.name, "it failed") for m in old], revisits_s


def free_ordinals(members: list[Member], num: int) -> list[int]:
    """Return the `num` lowest ordinals that no member has; empty if `num` is negative."""
    in_use = {m.ordinal for m in members}
    return list(islice((ordinal for ordinal in count() if ordinal not in in_use), max(0, num)))


def surge_timeout_of(current: list[Member], update: Update, now: datetime) -> Timeout:
    """Return the state of the surge timeout.

    After this timeout, an outdated member is removed to free resources for a member in `current`
    that fits on no node.
    """
    return _timeout((m.no_room_since for m in current), update.surge_timeout_s, now)


def progress_deadline_of(
    new_pods: Iterable[tuple[datetime | None, datetime | None]], deadline_s: float, now: datetime
) -> Timeout:
    """Return the state of the progress deadline.

    The rollout stalls if a new pod is not ready at this deadline. Pods that fit on no node are
    ignored, because the rollout waits for free resources or for the surge timeout.

    Args:
        new_pods: (`Member.unready_since`, `Member.no_room_since`) of each pod.
    """
    times = (unready_since for unready_since, no_room_since in new_pods if no_room_since is None)
    return _timeout(times, deadline_s, now)


def _timeout(times: Iterable[datetime | None], timeout_s: float, now: datetime) -> Timeout:
    """Return the state of a timeout that started at the earliest of `times`.

    If all times are None, the timeout does not run.
    """
    since = min((time for time in times if time is not None), default=None)
    if since is None:
        return Timeout()
    left_s = timeout_s - (now - since).total_seconds()
    return Timeout(left_s=left_s) if left_s > 0 else Timeout(has_passed=True)


def deletion_reason(member: Member, drain_timeout_s: float, now: datetime) -> str:
    """Return why a draining member may be deleted now; empty if it must stay."""
    if not member.started:
        return "it is not running"
    if member.unfinished == 0:
        return "it has drained"
    if member.drain_started is not None and now >= member.drain_started + timedelta(
        seconds=drain_timeout_s
    ):
        return f"it has not drained within {drain_timeout_s:g} s"
    return ""


def _members_to_remove(group: _Group) -> list[Member]:
    """Return the members that must leave: surplus members, and outdated members to replace."""
    target, update = group.target, group.target.update
    # A pause keeps even the members that were created to surge.
    keeps_surge = update.paused and len({m.revision for m in group.present}) > 1
    max_newest = target.size + (update.max_surge if keeps_surge else 0)
    # Unready members are removed first, then old revisions, then the highest ordinals.
    removal_order = sorted(
        group.current, key=lambda m: (m.ready, m.revision == target.revision, -m.ordinal)
    )
    num_surplus = max(0, len(removal_order) - max_newest)
    # While the rollout stalls, unready members of earlier revisions are kept: they may be restored
    # members that are still starting.
    replaceable = [m for m in group.outdated if m.ready or not group.progress_deadline.has_passed]
    max_unavailable = max(update.max_unavailable, 1 if group.surge_timeout.has_passed else 0)
    return removal_order[:num_surplus] + _outdated_to_replace(
        removal_order[num_surplus:], replaceable, target.size - max_unavailable
    )


def _outdated_to_replace(
    current: list[Member], outdated: list[Member], min_ready: int
) -> list[Member]:
    """Return the outdated members that can be replaced now, those that are not ready first.

    The number of ready members does not fall below `min_ready` because of a replacement. If no
    member is ready and no current member exists, all outdated members are returned.
    """
    num_ready = sum(m.ready for m in [*current, *outdated])
    if not num_ready and not current:
        return outdated  # no member serves, so no capacity can be lost
    # A new member that is not ready may never become ready. So it replaces no outdated member yet,
    # whether that member is ready or not.
    num_replaceable = len(outdated) - (min_ready - sum(m.ready for m in current))
    highest_first = sorted(outdated, key=lambda m: -m.ordinal)
    unready = [m for m in highest_first if not m.ready][: max(0, num_replaceable)]
    num_spare = min(num_replaceable - len(unready), num_ready - min_ready)
    return unready + [m for m in highest_first if m.ready][: max(0, num_spare)]


def _num_to_create(group: _Group, *, use_previous: bool) -> int:
    """Return how many members to create. A negative number means none.

    The group may have `max_surge` more members than desired during a rollout, and while a member
    that another client deleted is replaced.

    Args:
        use_previous: create members of the previous revision. They replace members of the newest
            revision that are not ready.
    """
    target, paused = group.target, group.target.update.paused
    is_rollout = not paused and (
        group.progress_deadline.has_passed
        or any(m.revision != target.revision for m in group.present)
    )
    is_deleted_by_others = any(m.deletion is not None and not m.draining for m in group.present)
    max_surge = target.update.max_surge if is_rollout or is_deleted_by_others else 0
    in_place = group.current
    if use_previous:
        in_place = [m for m in group.current if m.ready or paused] + group.outdated
    return min(target.size - len(in_place), target.size + max_surge - len(group.present))
