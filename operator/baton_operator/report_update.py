"""How far a new revision has got: the condition `Updating`. Pure.

It is True while pods of an earlier revision exist, and says what is waited for. It is False when there are none, when the
service is paused, and when a new revision does not get on. `Ready` is True only when all pods, of the newest revision, serve.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from baton_operator import names
from baton_operator.diagnose import Diagnosis, diagnose, leaving
from baton_operator.observe import is_ready, no_room_since, parse_time, unready_since
from baton_operator.plan import STUCK_TERMINATING
from baton_operator.references import Reference
from baton_operator.refusals import QUOTA_EXCEEDED, Refusal
from baton_operator.report_topology import Verdict

Object = dict[str, Any]

UP_TO_DATE = "UpToDate"
PAUSED = "Paused"
STALLED = "RolloutStalled"
REFUSED = "PodRefused"
_ORDER = (STALLED, REFUSED, "WaitingForCapacity", "Draining", "Starting", "Replacing")
"""Of reasons, the most telling first."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One role: its pods of earlier revisions, and those that are to follow them."""

    role: names.Role
    desired: int
    newest: list[Object]
    old: list[Object]
    """Pods; those that leave included."""
    refusal: Refusal | None = None
    """Why the API server takes no further pod."""
    missing: frozenset[Reference] = frozenset()
    """Secrets and ConfigMaps that pods wait for and that do not exist."""


def rollout(
    role: names.Role,
    desired: int,
    pods: list[Object],
    newest: list[Object],
    now: datetime,
    refusal: Refusal | None = None,
    missing: frozenset[Reference] = frozenset(),
) -> Rollout:
    """`newest`: those of `pods` that are of the newest revision."""
    alive = [pod for pod in pods if _exists(pod, now)]
    return Rollout(
        role=role,
        desired=desired,
        newest=[pod for pod in alive if pod in newest],
        old=[pod for pod in alive if pod not in newest],
        refusal=refusal,
        missing=missing,
    )


def updating_verdict(
    rollouts: list[Rollout], *, progress_deadline_s: float, paused: bool, held_back: tuple[str, ...], now: datetime
) -> Verdict:
    """status, reason, message of `Updating`. `held_back`: fields whose edits wait for the end of the pause."""
    under_way = [each for each in rollouts if each.old]
    counts = "; ".join(_counts(each) for each in under_way)
    if paused:
        edits = f"edits of {', '.join(held_back)} wait" if held_back else "no edit waits; one would"
        return "False", PAUSED, f"{edits} until spec.paused is false{'; ' if counts else ''}{counts}"
    if not under_way:
        return "False", UP_TO_DATE, "no pod of an earlier revision exists"
    waits = [_waits_for(each, progress_deadline_s, now) for each in under_way]
    reason, message = min(waits, key=lambda wait: _ORDER.index(wait[0]))
    return "False" if reason == STALLED else "True", reason, f"{message}; {counts}"


def _waits_for(each: Rollout, progress_deadline_s: float, now: datetime) -> tuple[str, str]:
    unready = [pod for pod in each.newest if not is_ready(pod) and not leaving(pod)]
    diagnosis = diagnose(unready, each.missing)
    late = [pod for pod in unready if now - (unready_since(pod) or now) > timedelta(seconds=progress_deadline_s)]
    if late:
        why = diagnosis or Diagnosis("", f"pod {_names(late)} is not ready")
        since = f"not within {progress_deadline_s:g} s"
        return STALLED, f"{each.role}: {why.message}; {since}; pods of the earlier revision serve on"
    if any(map(no_room_since, unready)):
        return "WaitingForCapacity", f"{each.role}: no node has room for pod {_names(unready)}"
    if each.refusal is not None:
        has_room = each.refusal.reason != QUOTA_EXCEEDED
        return REFUSED if has_room else "WaitingForCapacity", f"{each.role}: {each.refusal.message}"
    if going := [pod for pod in each.old if leaving(pod)]:
        return "Draining", f"{each.role}: waits for {_names(going)} to finish and go"
    if unready:
        return (
            "Starting",
            f"{each.role}: {diagnosis.message if diagnosis else f'waits for {_names(unready)} to be ready'}",
        )
    return "Replacing", f"{each.role}: {_names(each.old)} is to be replaced"


def _counts(each: Rollout) -> str:
    ready = sum(map(is_ready, each.newest))
    old_ready = sum(is_ready(pod) and not leaving(pod) for pod in each.old)
    newest = f"{len(each.newest)} of {each.desired} {each.role} pods are of the newest revision, {ready} of them ready"
    return f"{newest}, {len(each.old)} of earlier ones, {old_ready} of them ready"


def _exists(pod: Object, now: datetime) -> bool:
    """Not one that failed, or hangs on a node that is gone."""
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return False
    deletion = parse_time(pod["metadata"].get("deletionTimestamp"))
    return deletion is None or now < deletion + STUCK_TERMINATING


def _names(pods: list[Object]) -> str:
    return ", ".join(sorted(str(pod["metadata"]["name"]) for pod in pods))
