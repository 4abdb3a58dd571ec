"""Compute the condition Updating, which reports the progress of a rollout. Pure.

Updating is True while pods of an earlier revision exist. The message names what the rollout waits
for, which `_POLICIES` finds. Updating is False without such pods, in a pause, and when the rollout
stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from baton_kube.client import Object
from baton_operator.api.llmservice import Spec
from baton_operator.observe.observation import (
    has_ended,
    is_ready,
    no_room_since,
    parse_time,
    unready_since,
)
from baton_operator.plan.plan_group import STUCK_TERMINATING, progress_deadline_of
from baton_operator.plan.refused_pods import POD_REFUSED, QUOTA_EXCEEDED
from baton_operator.status.diagnose import Diagnosis, Verdict, diagnose, is_leaving, pods_text
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.suspended_engines import diagnose_suspended


class _Rollout(NamedTuple):
    """The existing pods of one group by revision, including draining and terminating pods."""

    group: ReportedGroup
    newest: list[Object]
    old: list[Object]
    progress_deadline_s: int
    now: datetime

    @property
    def unready(self) -> list[Object]:
        """The unready pods of the newest revision, except draining and terminating pods."""
        return [pod for pod in self.newest if not is_ready(pod) and not is_leaving(pod)]

    @property
    def failure(self) -> str:
        """The failure of a pod in `unready`, as a message; empty if no failure was found.

        Pods that fit on no node are ignored.
        """
        fitting = [pod for pod in self.unready if not no_room_since(pod)]
        found = diagnose(fitting, self.group.missing)
        return found.message if found else ""


def updating_verdict(
    spec: Spec, groups: Iterable[ReportedGroup], held_back: tuple[str, ...], now: datetime
) -> Verdict:
    """Return the verdict on the condition Updating.

    Args:
        held_back: fields of the spec whose edits wait until `spec.paused` is false.
    """
    rollouts = [_rollout(group, spec.progress_deadline_seconds, now) for group in groups]
    under_way = [rollout for rollout in rollouts if rollout.old]
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
    role, first = next(
        (rollout.group.role, found)
        for policy in _POLICIES
        for rollout in under_way
        if (found := policy(rollout))
    )
    return Verdict(
        "False" if first.reason == Failure.ROLLOUT_STALLED else "True",
        first.reason,
        f"{role}: {first.message}; {counts}",
    )


def _rollout(group: ReportedGroup, progress_deadline_s: int, now: datetime) -> _Rollout:
    alive = [pod for pod in group.pods if _exists(pod, now)]
    newest = [pod for pod in alive if group.is_newest(pod)]
    old = [pod for pod in alive if not group.is_newest(pod)]
    return _Rollout(group, newest, old, progress_deadline_s, now)


def _stalled(rollout: _Rollout) -> Diagnosis | None:
    deadline_s, suspended_at = rollout.progress_deadline_s, rollout.group.suspended_at
    late = [
        pod
        for pod in rollout.unready
        if progress_deadline_of(
            [(unready_since(pod, suspended_at), no_room_since(pod))], deadline_s, rollout.now
        ).has_passed
    ]
    if not late:
        return None
    why = f"{pods_text(late)} {'were' if len(late) > 1 else 'was'} not ready within {deadline_s} s"
    cause = f": {rollout.failure}" if rollout.failure else ""
    hint = "pods of the earlier revision keep serving; correct the spec or undo the edit"
    return Diagnosis(Failure.ROLLOUT_STALLED, f"{why}{cause}; {hint}")


def _refused(rollout: _Rollout) -> Diagnosis | None:
    refusal = rollout.group.refusal
    if refusal is None or refusal.reason == QUOTA_EXCEEDED:
        return None
    return Diagnosis(POD_REFUSED, refusal.message)


def _waiting_for_capacity(rollout: _Rollout) -> Diagnosis | None:
    if roomless := [pod for pod in rollout.unready if no_room_since(pod)]:
        message = f"no node has room for {pods_text(roomless)}; add or free capacity"
    elif rollout.group.refusal is not None:  # QuotaExceeded: see `_refused`
        message = rollout.group.refusal.message
    else:
        return None
    return Diagnosis(Progress.WAITING_FOR_CAPACITY, message)


def _suspended(rollout: _Rollout) -> Diagnosis | None:
    return diagnose_suspended(rollout.unready, rollout.group.suspended)


def _draining(rollout: _Rollout) -> Diagnosis | None:
    leaving = [pod for pod in rollout.old if is_leaving(pod)]
    text = f"waiting for {pods_text(leaving)} to drain and end"
    return Diagnosis(Progress.DRAINING, text) if leaving else None


def _starting(rollout: _Rollout) -> Diagnosis | None:
    text = rollout.failure or f"waiting for {pods_text(rollout.unready)} to be ready"
    return Diagnosis(Progress.STARTING, text) if rollout.unready else None


def _replacing(rollout: _Rollout) -> Diagnosis:
    return Diagnosis(Progress.REPLACING, f"still to be replaced: {pods_text(rollout.old)}")


#: What a rollout may wait for, the most urgent first. The condition reports the first result.
_POLICIES: tuple[Callable[[_Rollout], Diagnosis | None], ...] = (
    _stalled,
    _refused,
    _waiting_for_capacity,
    _suspended,
    _draining,
    _starting,
    _replacing,
)


def _counts(rollout: _Rollout) -> str:
    """Return a text with the numbers of desired pods and of existing pods by revision."""
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
    deletion = parse_time(pod["metadata"].get("deletionTimestamp"))
    is_stuck = deletion is not None and now >= deletion + STUCK_TERMINATING
    return not has_ended(pod) and not is_stuck
