"""Plan the next step of one group of members. Pure: no client and no clock.

A member leaves in three steps, and each is observed in the cluster before the next:

1. It is marked as draining, so gateways send it no new requests.
2. It drains until nothing is unfinished or the drain timeout has passed.
3. It is deleted.

Members of an earlier revision are replaced within two bounds. At most `desired + max_surge` members
exist, those that leave included. At least `desired - max_unavailable` members serve. A new member
that is not ready counts against the second bound, so a revision that never becomes ready stops
there and the others keep serving. A new member for which no node has room takes the place of an old
one after `surge_timeout_s`.

A member that another client deletes is replaced at once if a surge is allowed, otherwise when it is
gone. The replacement is of the newest revision, with two exceptions: in a pause, and while a member
of the newest revision has missed its progress deadline. Then it is of the previous revision, the
last one with which the whole service was ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import count, islice

import msgspec

from baton_operator import names
from baton_operator.api.spec_groups import surge_and_unavailable
from baton_operator.builders.owner import Owner

#: A pod that still exists this long after its grace period is on a lost node and does not count any
#: more.
STUCK_TERMINATING = timedelta(seconds=30)
POLL_DRAIN_S = 0.5
#: Minimum age at which a failed member is deleted. It limits how fast a pod that fails at once is
#: created again.
FAILED_HOLD = timedelta(seconds=10)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member pod, as observed."""

    name: str
    ordinal: int
    revision: str
    ready: bool = False
    failed: bool = False  # phase Failed or Succeeded: its containers will not run again
    serving: bool = False  # its container has started, so it may hold requests
    draining: bool = False
    drain_started: datetime | None = None
    unfinished: int | None = None  # reply to POST /drain; None: no request, or no reply
    deletion: datetime | None = None  # end of its grace period, if it is being deleted
    created: datetime | None = None
    unready_since: datetime | None = None  # when it was created or last ready, if it is not ready
    expert_group: str = ""  # of a rank: ranks with the same value can be in one topology
    #: Since when it cannot be scheduled only because other pods use the resources.
    no_room_since: datetime | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """How members of an earlier revision are replaced.

    With `max_surge` and `max_unavailable` both 0, no member is replaced.
    """

    max_surge: int = 1
    max_unavailable: int = 0
    #: A new member without room takes the place of an old one after this time.
    surge_timeout_s: float = 30.0
    #: A new member that is not ready after this time stalls the rollout.
    progress_deadline_s: float = 600.0
    paused: bool = False  # members of earlier revisions count as new ones


class Delete(msgspec.Struct, frozen=True):
    """A member to delete, and why."""

    name: str
    why: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step of one group."""

    create: list[int] = []  # ordinals
    restore: list[int] = []  # ordinals of members to create with the previous revision
    drain: list[str] = []  # members to mark as draining
    delete: list[Delete] = []
    #: Plan again after this time, because a change without an event is expected.
    revisit_s: float | None = None

    @property
    def acts(self) -> bool:
        """Whether the plan changes any member."""
        return bool(self.create or self.restore or self.drain or self.delete)


def update_of(owner: Owner, role: names.MemberRole) -> Update:
    """Return how `spec.updateStrategy` replaces the members of `role`, as numbers of members."""
    strategy = (
        owner.spec.update_strategy.decode
        if role == "decode"
        else owner.spec.update_strategy.prefill
    )
    max_surge, max_unavailable = surge_and_unavailable(strategy, owner.replicas(role))
    return Update(
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        surge_timeout_s=float(strategy.surge_timeout_seconds),
        progress_deadline_s=float(owner.spec.progress_deadline_seconds),
        paused=owner.spec.paused,
    )


def plan_group(
    members: list[Member],
    *,
    desired: int,
    revision: str,
    update: Update,
    drain_timeout_s: float,
    now: datetime,
    has_previous_revision: bool = False,
) -> GroupPlan:
    """Return the next step towards `desired` members of `revision`.

    Args:
        has_previous_revision: there is a previous revision, different from `revision`, whose
            members can be created.
    """
    present = present_members(members, now)
    delete, waits = plan_failed(present, now)
    staying = [m for m in present if m.deletion is None and not m.failed and not m.draining]
    draining = [m for m in present if m.deletion is None and not m.failed and m.draining]
    delete += [
        Delete(m.name, why) for m in draining if (why := deletion_reason(m, drain_timeout_s, now))
    ]

    newest = [m for m in staying if update.paused or m.revision == revision]
    outdated = [m for m in staying if m not in newest]
    max_unavailable = update.max_unavailable
    stall_left_s = (
        _stall_timeout_left_s(newest, update, now)
        if has_previous_revision and not update.paused
        else None
    )
    if (
        outdated
        and stall_left_s != 0
        and (wait_s := room_timeout_left_s(newest, update, now)) is not None
    ):
        if wait_s > 0:
            waits.append(wait_s)
        else:
            max_unavailable = max(1, max_unavailable)

    revisions = {m.revision for m in present}
    # A pause keeps even the members that were created to surge.
    leavers = _surplus(
        newest,
        desired + (update.max_surge if update.paused and len(revisions) > 1 else 0),
        revision,
    )
    kept = [m for m in newest if m not in leavers]
    # While the rollout stalls, members of the previous revision that start are not replaced.
    replaceable = [m for m in outdated if m.ready] if stall_left_s == 0 else outdated
    leavers += _replaced(kept, replaceable, desired - max_unavailable)
    # A member that another client marked has no drain_started: it is marked again.
    drain = [
        m.name for m in [*(m for m in draining if m.drain_started is None), *leavers] if m.serving
    ]
    delete += [Delete(m.name, "it had not started") for m in leavers if not m.serving]
    if draining or drain:
        waits.append(POLL_DRAIN_S)
    if stall_left_s:
        waits.append(stall_left_s)

    is_rollout = not update.paused and (bool(revisions - {revision}) or stall_left_s == 0)
    is_deleted_by_others = any(m.deletion is not None and not m.draining for m in present)
    room = desired + (update.max_surge if is_rollout or is_deleted_by_others else 0) - len(present)
    create, restore = [], []
    if has_previous_revision and (update.paused or stall_left_s == 0):
        serving = [m for m in newest if m.ready or update.paused]
        restore = free_ordinals(members, min(desired - len(serving) - len(outdated), room))
    else:
        create = free_ordinals(members, min(desired - len(newest), room))
    return GroupPlan(
        create=create,
        restore=restore,
        drain=drain,
        delete=delete,
        revisit_s=min(waits, default=None),
    )


def present_members(members: list[Member], now: datetime) -> list[Member]:
    """Return the members without those that are stuck in termination."""
    return [m for m in members if m.deletion is None or now < m.deletion + STUCK_TERMINATING]


def plan_failed(present: list[Member], now: datetime) -> tuple[list[Delete], list[float]]:
    """Return the failed members to delete, and seconds after which to plan for the others."""
    failed = [m for m in present if m.failed and m.deletion is None]
    old = [m for m in failed if m.created is None or now >= m.created + FAILED_HOLD]
    waits = [FAILED_HOLD.total_seconds()] if len(old) < len(failed) else []
    return [Delete(m.name, "it failed") for m in old], waits


def free_ordinals(members: list[Member], num: int) -> list[int]:
    """Return the `num` lowest ordinals that no member has; none if `num` is negative."""
    in_use = {m.ordinal for m in members}
    return list(islice((ordinal for ordinal in count() if ordinal not in in_use), max(0, num)))


def room_timeout_left_s(newest: list[Member], update: Update, now: datetime) -> float | None:
    """Return the seconds until a new member without room may take the place of an old one.

    None: every new member has room.
    """
    return _remaining_s((m.no_room_since for m in newest), update.surge_timeout_s, now)


def deletion_reason(member: Member, drain_timeout_s: float, now: datetime) -> str:
    """Return why a draining member may be deleted now; empty: not yet."""
    if not member.serving:
        return "it is not running"
    if member.unfinished == 0:
        return "it has drained"
    if member.drain_started is not None and now >= member.drain_started + timedelta(
        seconds=drain_timeout_s
    ):
        return f"it has not drained within {drain_timeout_s:g} s"
    return ""


def _stall_timeout_left_s(newest: list[Member], update: Update, now: datetime) -> float | None:
    """Return the seconds until the first new member misses its progress deadline.

    None: all new members are ready or wait for room.
    """
    unready = (m.unready_since for m in newest if m.no_room_since is None)
    return _remaining_s(unready, update.progress_deadline_s, now)


def _remaining_s(times: Iterable[datetime | None], timeout_s: float, now: datetime) -> float | None:
    """Return the seconds left until `timeout_s` after the earliest of `times`.

    0: that has passed. None: there is no time.
    """
    since = min((time for time in times if time is not None), default=None)
    return None if since is None else max(0.0, timeout_s - (now - since).total_seconds())


def _surplus(newest: list[Member], desired: int, revision: str) -> list[Member]:
    """Return the members beyond `desired`.

    Unready members come first, then old revisions, then the highest ordinals.
    """
    ranked = sorted(newest, key=lambda m: (m.ready, m.revision == revision, -m.ordinal))
    return ranked[: max(0, len(newest) - desired)]


def _replaced(newest: list[Member], outdated: list[Member], wanted_ready: int) -> list[Member]:
    """Return the outdated members to replace now: unready ones, then those that can be spared."""
    num_ready = sum(m.ready for m in [*newest, *outdated])
    if not num_ready and not newest:
        return outdated  # no member serves, so no capacity can be lost
    # New members that are not ready may never be: each keeps an outdated member in place, even an
    # unready one.
    budget = len(newest) + len(outdated) - wanted_ready - sum(not m.ready for m in newest)
    highest_first = sorted(outdated, key=lambda m: -m.ordinal)
    idle = [m for m in highest_first if not m.ready][: max(0, budget)]
    spared = min(budget - len(idle), num_ready - wanted_ready)
    return idle + [m for m in highest_first if m.ready][: max(0, spared)]
