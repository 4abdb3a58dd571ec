"""What to do next with the members of one group. Pure: no client and no clock.

A member leaves in three steps, each seen in the cluster before the next: it is marked as draining (the gateway sends it nothing
new), it is asked to drain until nothing is unfinished or the time is up, it is deleted.

Members of an earlier revision are replaced within two bounds: no more than `desired + max_surge` members exist, those that leave
included, and no fewer than `desired - max_unavailable` serve. A new member that is not ready counts against what may leave, so a
revision that never gets ready stops there and the others serve on. A new member that no node has room for takes the place of an
old one after a while, so a full cluster is no dead end.

A member that somebody else deletes is replaced at once where a surge is allowed, else when it is gone. What replaces it is of the
newest revision, but for two cases: in a pause, and while a member of the newest revision is not ready by its deadline, it is of the
former revision, the last one with which the whole service was ready. So a revision that is broken, or held back, gains nothing
from the deaths of others.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from baton_operator import names
from baton_operator.api_groups import surge_and_unavailable
from baton_operator.builders.owner import Owner

STUCK_TERMINATING = timedelta(seconds=30)
"""A pod that still exists this long after its grace period is on a node that is gone: it no longer holds its place."""
POLL_DRAIN_S = 0.5
FAILED_HOLD = timedelta(seconds=10)
"""A member that failed exists at least this long: one that fails at once (a node that refuses it, say) must not be made
again and again as fast as the API server can, and its end must be seen."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member pod, as observed."""

    name: str
    ordinal: int
    revision: str
    ready: bool = False
    failed: bool = False
    """Phase Failed or Succeeded: its containers will not run again."""
    serving: bool = False
    """Its container has started, so it may hold requests."""
    draining: bool = False
    drain_started: datetime | None = None
    unfinished: int | None = None
    """As it answered to the request to drain; None: it was not asked or did not answer."""
    deletion: datetime | None = None
    """When its grace period ends, if it is being deleted."""
    created: datetime | None = None
    unready_since: datetime | None = None
    """Since when it is not ready, if it is not: since it was made, or was ready last."""
    expert_group: str = ""
    """Of a rank of an expert-parallel group: which others it can be in one topology with."""
    no_room_since: datetime | None = None
    """Since when no node has had room for it, though one would if another pod left."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """How members of an earlier revision are replaced."""

    max_surge: int = 1
    max_unavailable: int = 0
    """Both zero: nothing is replaced."""
    surge_timeout_s: float = 30.0
    """A new member that had no room for so long takes the place of an old one."""
    progress_deadline_s: float = 600.0
    """A new member that is not ready for so long may never be."""
    paused: bool = False
    """Members of earlier revisions are as good as new ones."""


class Delete(msgspec.Struct, frozen=True):
    name: str
    why: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step of one group."""

    create: list[int] = []
    """Ordinals."""
    restore: list[int] = []
    """Ordinals, to be made of the former revision."""
    drain: list[str] = []
    """Members to mark as draining."""
    delete: list[Delete] = []
    revisit_s: float | None = None
    """Look again after this long: something is under way that raises no event."""

    @property
    def acts(self) -> bool:
        """Whether the plan changes any member."""
        return bool(self.create or self.restore or self.drain or self.delete)


def update_of(owner: Owner, role: names.MemberRole) -> Update:
    """Return how `spec.updateStrategy` replaces the members of `role`, as numbers of members."""
    strategy = owner.spec.update_strategy.decode if role == "decode" else owner.spec.update_strategy.prefill
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
    has_former: bool = False,
) -> GroupPlan:
    """The next step towards `desired` members of `revision`.

    Args:
        has_former: members of the former revision, which is another one, can be made.
    """
    present = [m for m in members if m.deletion is None or now < m.deletion + STUCK_TERMINATING]
    staying = [m for m in present if m.deletion is None and not m.failed and not m.draining]
    draining = [m for m in present if m.deletion is None and not m.failed and m.draining]

    failed = [m for m in present if m.deletion is None and m.failed]
    held = [m for m in failed if m.created is not None and now < m.created + FAILED_HOLD]
    delete = [Delete(m.name, "it failed") for m in failed if m not in held]
    delete += [Delete(m.name, why) for m in draining if (why := may_go(m, drain_timeout_s, now))]

    newest = [m for m in staying if update.paused or m.revision == revision]
    outdated = [m for m in staying if m not in newest]
    waits = [POLL_DRAIN_S] if draining else []
    if held:
        waits.append(FAILED_HOLD.total_seconds())
    max_unavailable = update.max_unavailable
    stalled_in_s = _stalls_in(newest, update, now) if has_former and not update.paused else None
    if outdated and stalled_in_s != 0 and (wait_s := waits_for_room(newest, update, now)) is not None:
        if wait_s > 0:
            waits.append(wait_s)
        else:
            max_unavailable = max(1, max_unavailable)

    revisions = {m.revision for m in present}
    # A pause keeps even the members that were made to surge.
    leavers = _surplus(newest, desired + (update.max_surge if update.paused and len(revisions) > 1 else 0), revision)
    kept = [m for m in newest if m not in leavers]
    # While the rollout stalls, members of the former revision start: they are not replaced before they are ready.
    replaceable = [m for m in outdated if m.ready] if stalled_in_s == 0 else outdated
    leavers += _replaced(kept, replaceable, desired - max_unavailable)
    # Marked by someone else, without a time from which to count: it drains like any other.
    drain = [m.name for m in draining if m.serving and m.drain_started is None]
    drain += [m.name for m in leavers if m.serving]
    delete += [Delete(m.name, "it had not started") for m in leavers if not m.serving]
    if drain:
        waits.append(POLL_DRAIN_S)

    ordinals_in_use = {m.ordinal for m in members}
    free = (ordinal for ordinal in range(len(ordinals_in_use) + desired) if ordinal not in ordinals_in_use)
    if stalled_in_s:
        waits.append(stalled_in_s)
    is_rollout = not update.paused and (bool(revisions - {revision}) or stalled_in_s == 0)
    room = desired + (update.max_surge if is_rollout or _somebody_deletes(present) else 0) - len(present)
    create, restore = [], []
    if has_former and (update.paused or stalled_in_s == 0):
        serving = [m for m in newest if m.ready or update.paused]
        restore = [next(free) for _ in range(min(desired - len(serving) - len(outdated), room))]
    else:
        create = [next(free) for _ in range(min(desired - len(newest), room))]
    return GroupPlan(create=create, restore=restore, drain=drain, delete=delete, revisit_s=min(waits, default=None))


def waits_for_room(newest: list[Member], update: Update, now: datetime) -> float | None:
    """Seconds until a member of the newest revision may take an old one's place, 0: it may; None: none waits for room."""
    since = min((m.no_room_since for m in newest if m.no_room_since is not None), default=None)
    if since is None:
        return None
    return max(0.0, (since + timedelta(seconds=update.surge_timeout_s) - now).total_seconds())


def may_go(member: Member, drain_timeout_s: float, now: datetime) -> str:
    """Why a draining member may be deleted now; empty: not yet."""
    if not member.serving:
        return "it is not running"
    if member.unfinished == 0:
        return "it has drained"
    if member.drain_started is not None and now >= member.drain_started + timedelta(seconds=drain_timeout_s):
        return f"it has not drained within {drain_timeout_s:g} s"
    return ""


def _stalls_in(newest: list[Member], update: Update, now: datetime) -> float | None:
    """Seconds until a member of the newest revision has not been ready for too long, 0: it has not; None: all are ready."""
    since = min((m.unready_since for m in newest if m.unready_since is not None), default=None)
    if since is None:
        return None
    return max(0.0, (since + timedelta(seconds=update.progress_deadline_s) - now).total_seconds())


def _somebody_deletes(present: list[Member]) -> bool:
    """Whether a member goes that was not asked to drain before."""
    return any(m.deletion is not None and not m.draining for m in present)


def _surplus(newest: list[Member], desired: int, revision: str) -> list[Member]:
    """Who leaves when there are too many: those that serve nothing, then old revisions, then the highest ordinals."""
    ranked = sorted(newest, key=lambda m: (m.ready, m.revision == revision, -m.ordinal))
    return ranked[: max(0, len(newest) - desired)]


def _replaced(newest: list[Member], outdated: list[Member], wanted_ready: int) -> list[Member]:
    """The members to replace by a new revision now: those that serve nothing, then those that the others can spare."""
    num_ready = sum(m.ready for m in [*newest, *outdated])
    if not num_ready and not newest:
        return outdated  # nothing serves: nothing can be lost
    # New members that are not ready yet may never be: what they should replace stays, even if it serves nothing now.
    budget = len(newest) + len(outdated) - wanted_ready - sum(not m.ready for m in newest)
    highest_first = sorted(outdated, key=lambda m: -m.ordinal)
    idle = [m for m in highest_first if not m.ready][: max(0, budget)]
    spared = min(budget - len(idle), num_ready - wanted_ready)
    return idle + [m for m in highest_first if m.ready][: max(0, spared)]
