"""Compute the condition Updating, which reports the progress of a rollout. Pure.

Updating is True while pods of an earlier revision exist. The message names what the rollout waits
for. Updating is False without such pods, in a pause, and when the rollout stalls.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from baton_kube.client import Object
from baton_operator.api.llmservice import Spec
from baton_operator.observe.observation import is_ready, no_room_since, parse_time, unready_since
from baton_operator.plan.plan_group import STUCK_TERMINATING
from baton_operator.plan.refused_pods import POD_REFUSED, QUOTA_EXCEEDED
from baton_operator.status.diagnose import Diagnosis, Verdict, diagnose, is_leaving, pods_text
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.suspended_engines import diagnose_suspended

#: Reasons of the condition, the most urgent first. The condition describes the group that has the
#: first of these reasons.
_ORDER = (
    Failure.ROLLOUT_STALLED,
    POD_REFUSED,
    Progress.WAITING_FOR_CAPACITY,
    Progress.ENGINE_ASLEEP,
    Progress.ENGINE_PAUSED,
    Progress.DRAINING,
    Progress.STARTING,
    Progress.REPLACING,
)


class _Rollout(NamedTuple):
    """The existing pods of one group by revision, including pods that are leaving."""

    group: ReportedGroup
    newest: list[Object]
    old: list[Object]


def updating_verdict(
    spec: Spec, groups: Iterable[ReportedGroup], held_back: tuple[str, ...], now: datetime
) -> Verdict:
    """Return the condition Updating.

    Args:
        held_back: fields of the spec whose edits wait until `spec.paused` is false.
    """
    under_way = [rollout for rollout in (_rollout(group, now) for group in groups) if rollout.old]
    counts = "; ".join(map(_counts, under_way))
    if spec.paused:
        edits = (
            f"edits of {', '.join(held_back)} wait"
            if held_back
            else "no edit waits; later edits wait"
        )
        return Verdict(
            "False",
            Settled.PAUSED,
            f"{edits} until spec.paused is false{'; ' if counts else ''}{counts}",
        )
    if not under_way:
        return Verdict("False", Settled.UP_TO_DATE, "no pod of an earlier revision exists")
    obstacles = [
        (each.group.role, _obstacle(each, spec.progress_deadline_seconds, now))
        for each in under_way
    ]
    role, first = min(obstacles, key=lambda obstacle: _ORDER.index(obstacle[1].reason))
    return Verdict(
        "False" if first.reason == Failure.ROLLOUT_STALLED else "True",
        first.reason,
        f"{role}: {first.message}; {counts}",
    )


def _rollout(group: ReportedGroup, now: datetime) -> _Rollout:
    alive = [pod for pod in group.pods if _exists(pod, now)]
    newest = [pod for pod in alive if group.is_newest(pod)]
    return _Rollout(group, newest, old=[pod for pod in alive if not group.is_newest(pod)])


def _obstacle(rollout: _Rollout, progress_deadline_s: int, now: datetime) -> Diagnosis:
    """Return what the rollout of one group waits for, as the reason and message of Updating."""
    group = rollout.group
    unready = [pod for pod in rollout.newest if not is_ready(pod) and not is_leaving(pod)]
    found = diagnose(unready, group.missing)
    deadline = timedelta(seconds=progress_deadline_s)
    late = [p for p in unready if now - (unready_since(p, group.suspended_at) or now) > deadline]
    if late:
        verb = "were" if len(late) > 1 else "was"
        why = f"{pods_text(late)} {verb} not ready within {progress_deadline_s} s"
        cause = f": {found.message}" if found else ""
        hint = "pods of the earlier revision keep serving; correct the spec or undo the edit"
        return Diagnosis(Failure.ROLLOUT_STALLED, f"{why}{cause}; {hint}")
    if any(map(no_room_since, unready)):
        return Diagnosis(
            Progress.WAITING_FOR_CAPACITY,
            f"no node has room for {pods_text(unready)}; add or free capacity",
        )
    if group.refusal is not None:
        is_full = group.refusal.reason == QUOTA_EXCEEDED
        return Diagnosis(
            Progress.WAITING_FOR_CAPACITY if is_full else POD_REFUSED, group.refusal.message
        )
    if suspended := diagnose_suspended(unready, group.suspended):
        return suspended
    if going := [pod for pod in rollout.old if is_leaving(pod)]:
        return Diagnosis(Progress.DRAINING, f"waiting for {pods_text(going)} to drain and end")
    if unready:
        return Diagnosis(
            Progress.STARTING,
            found.message if found else f"waiting for {pods_text(unready)} to be ready",
        )
    return Diagnosis(Progress.REPLACING, f"still to be replaced: {pods_text(rollout.old)}")


def _counts(rollout: _Rollout) -> str:
    """Return the numbers of desired, newest and earlier pods of one group, as text."""
    newest, group = rollout.newest, rollout.group
    num_old_ready = sum(is_ready(pod) and not is_leaving(pod) for pod in rollout.old)
    return (
        f"{group.role} pods: {group.desired} desired, {len(newest)} of the newest revision "
        f"({sum(map(is_ready, newest))} ready), {len(rollout.old)} of earlier revisions "
        f"({num_old_ready} ready)"
    )


def _exists(pod: Object, now: datetime) -> bool:
    """Return whether the pod counts as existing.

    False: the pod has ended, or is stuck in termination on a lost node.
    """
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return False
    deletion = parse_time(pod["metadata"].get("deletionTimestamp"))
    return deletion is None or now < deletion + STUCK_TERMINATING
