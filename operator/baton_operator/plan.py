"""What to do next with the members of one group. Pure: no client and no clock.

A member leaves in three steps, each seen in the cluster before the next: it is marked as draining (the gateway sends it nothing
new), it is asked to drain until nothing is unfinished or the time is up, it is deleted. A new member takes its place when
it is gone, so a group never needs more room than its size.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

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
    expert_group: str = ""
    """Of a rank of an expert-parallel group: which others it can be in one topology with."""


class Delete(msgspec.Struct, frozen=True):
    name: str
    why: str


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next step of one group."""

    create: list[int] = []
    """Ordinals."""
    drain: list[str] = []
    """Members to mark as draining."""
    delete: list[Delete] = []
    revisit_s: float | None = None
    """Look again after this long: something is under way that raises no event."""


def plan_group(
    members: list[Member], *, desired: int, revision: str, drain_timeout_s: float, now: datetime
) -> GroupPlan:
    """The next step towards `desired` members of `revision`."""
    present = [m for m in members if m.deletion is None or now < m.deletion + STUCK_TERMINATING]
    ordinals_in_use = {m.ordinal for m in members}
    staying = [m for m in present if m.deletion is None and not m.failed and not m.draining]
    draining = [m for m in present if m.deletion is None and not m.failed and m.draining]

    failed = [m for m in present if m.deletion is None and m.failed]
    held = [m for m in failed if m.created is not None and now < m.created + FAILED_HOLD]
    delete = [Delete(m.name, "it failed") for m in failed if m not in held]
    delete += [Delete(m.name, why) for m in draining if (why := may_go(m, drain_timeout_s, now))]

    leavers = _surplus(staying, desired, revision)
    if not leavers and len(present) == len(staying):  # one replacement at a time
        leavers = _outdated(staying, desired, revision)
    # Marked by someone else, without a time from which to count: it drains like any other.
    drain = [m.name for m in draining if m.serving and m.drain_started is None]
    drain += [m.name for m in leavers if m.serving]
    delete += [Delete(m.name, "it had not started") for m in leavers if not m.serving]

    free = (ordinal for ordinal in range(len(ordinals_in_use) + desired) if ordinal not in ordinals_in_use)
    create = [next(free) for _ in range(desired - len(present))]
    waits = [POLL_DRAIN_S] if drain or draining else [FAILED_HOLD.total_seconds()] if held else []
    return GroupPlan(create=create, drain=drain, delete=delete, revisit_s=min(waits, default=None))


def may_go(member: Member, drain_timeout_s: float, now: datetime) -> str:
    """Why a draining member may be deleted now; empty: not yet."""
    if not member.serving:
        return "it is not running"
    if member.unfinished == 0:
        return "it has drained"
    if member.drain_started is not None and now >= member.drain_started + timedelta(seconds=drain_timeout_s):
        return f"it has not drained within {drain_timeout_s:g} s"
    return ""


def _surplus(staying: list[Member], desired: int, revision: str) -> list[Member]:
    """Who leaves when there are too many: those that serve nothing, then old revisions, then the highest ordinals."""
    ranked = sorted(staying, key=lambda m: (m.ready, m.revision == revision, -m.ordinal))
    return ranked[: max(0, len(staying) - desired)]


def _outdated(staying: list[Member], desired: int, revision: str) -> list[Member]:
    """The next member to replace by a new revision: one that serves nothing, else one that the others can spare."""
    outdated = [m for m in staying if m.revision != revision]
    idle = [m for m in outdated if not m.ready]
    spared = outdated if sum(m.ready for m in staying) >= desired else []
    return sorted(idle or spared, key=lambda m: -m.ordinal)[:1]
