"""Pods that the API server does not take: a quota is used up, an admission webhook says no, a rule of the namespace forbids them.

That stops nothing else: the group says so and serves on with what it has, and the pod is tried again ever more rarely.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.names import Key
from baton_operator.plan import GroupPlan

QUOTA_EXCEEDED = "QuotaExceeded"
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
_DENIED = ("admission webhook", "ValidatingAdmissionPolicy")
_REFUSING = (400, 403, 422)
"""HTTP codes of what asking again at once does not change."""


class Refusal(msgspec.Struct, frozen=True):
    """Why the API server did not take a pod."""

    reason: str
    message: str


class _Held(msgspec.Struct, frozen=True):
    revision: str
    refusal: Refusal
    times: int
    until: datetime


class Refusals:
    """What was refused last, by service and role. Of this process only: its successor tries at once."""

    def __init__(self) -> None:
        self._held: dict[tuple[Key, names.Role], _Held] = {}

    def hold_back(self, key: Key, role: names.Role, revision: str, plan: GroupPlan, now: datetime) -> GroupPlan:
        """`plan` without its creations while it is too early for another try; forgets what is not wanted any more."""
        held = self._held.get((key, role))
        if held is None:
            return plan
        if not (plan.create or plan.restore) or held.revision != revision:
            del self._held[key, role]
            return plan
        if now >= held.until:
            return plan
        wait_s = (held.until - now).total_seconds()
        return msgspec.structs.replace(plan, create=[], restore=[], revisit_s=min(wait_s, plan.revisit_s or wait_s))

    def note(self, key: Key, role: names.Role, revision: str, refusal: Refusal | None, now: datetime) -> float | None:
        """What came of a try. Returns seconds until the next one, None if nothing was refused."""
        if refusal is None:
            self._held.pop((key, role), None)
            return None
        before = self._held.get((key, role))
        times = before.times + 1 if before else 1
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(times - 1, 16))
        self._held[key, role] = _Held(revision, refusal, times, now + timedelta(seconds=pause_s))
        return pause_s

    def of(self, key: Key, role: names.Role) -> Refusal | None:
        held = self._held.get((key, role))
        return held.refusal if held else None

    def forget(self, key: Key) -> None:
        """The service is gone."""
        for role in names.MEMBER_ROLES:
            self._held.pop((key, role), None)


def refusal_of(error: KubeError, pod: str) -> Refusal | None:
    """None: it is not about this pod, but about the API server at this moment."""
    reason = _reason(str(error))
    if reason is None and error.status in _REFUSING:
        reason = "PodRefused"
    return Refusal(reason, f"the API server does not take pod {pod}: {error}") if reason else None


def refusal_of_deployment(deployment: dict[str, Any]) -> Refusal | None:
    """Of the pods that a Deployment wants to make."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            text = condition.get("message") or condition.get("reason") or "it does not say why"
            name = deployment["metadata"]["name"]
            return Refusal(
                _reason(text) or "PodRefused", f"the API server does not take pods of Deployment {name}: {text}"
            )
    return None


def _reason(text: str) -> str | None:
    if "exceeded quota" in text:
        return QUOTA_EXCEEDED
    if "failed calling webhook" in text:
        return "AdmissionWebhookFailed"
    if "denied" in text and any(words in text for words in _DENIED):
        return "AdmissionDenied"
    return None
