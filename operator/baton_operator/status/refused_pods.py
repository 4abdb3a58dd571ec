"""Pods that the API server refuses, for example because of a quota or an admission webhook.

The condition of the group reports the refusal, and its other pods keep serving. The pod is retried
with growing pauses.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.names import Key
from baton_operator.observe.observation import condition
from baton_operator.plan.plan_group import GroupPlan
from baton_operator.status.diagnose import Diagnosis

QUOTA_EXCEEDED = "QuotaExceeded"
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
_DENIED = ("admission webhook", "ValidatingAdmissionPolicy")
_REFUSING = (400, 403, 422)  # HTTP codes of refusals that an immediate retry does not change


class _Held(msgspec.Struct, frozen=True):
    revision: str
    refusal: Diagnosis
    pause_s: float
    until: datetime


class RefusedPods:
    """The last refusal of each service and role.

    Kept in memory: a new process tries again at once.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Key, names.Role], _Held] = {}

    def hold_back(
        self, key: Key, role: names.Role, revision: str, plan: GroupPlan, now: datetime
    ) -> GroupPlan:
        """Return `plan` without its creations until the pause has passed.

        A refusal that no longer applies is dropped.
        """
        held = self._held.get((key, role))
        if held is None:
            return plan
        if not (plan.create or plan.restore) or held.revision != revision:
            del self._held[key, role]
            return plan
        if now >= held.until:
            return plan
        wait_s = (held.until - now).total_seconds()
        return msgspec.structs.replace(
            plan, create=[], restore=[], revisit_s=min(wait_s, plan.revisit_s or wait_s)
        )

    def record(
        self, key: Key, role: names.Role, revision: str, refusal: Diagnosis | None, now: datetime
    ) -> float | None:
        """Record the result of a creation.

        Return the seconds until the next attempt, None if no pod was refused.
        """
        before = self._held.pop((key, role), None)
        if refusal is None:
            return None
        pause_s = min(LAST_PAUSE_S, before.pause_s * 2) if before else FIRST_PAUSE_S
        self._held[key, role] = _Held(revision, refusal, pause_s, now + timedelta(seconds=pause_s))
        return pause_s

    def get(self, key: Key, role: names.Role) -> Diagnosis | None:
        held = self._held.get((key, role))
        return held.refusal if held else None

    def forget(self, key: Key) -> None:
        """Drop the refusals of a deleted service."""
        for role in names.MEMBER_ROLES:
            self._held.pop((key, role), None)


def refusal_of(error: KubeError, pod: str) -> Diagnosis | None:
    """Return the refusal of `pod`.

    None: the error is about the API server's present state, not about this pod.
    """
    reason = _reason(str(error)) or ("PodRefused" if error.status in _REFUSING else None)
    return Diagnosis(reason, f"the API server refuses pod {pod}: {error}") if reason else None


def refusal_of_deployment(deployment: Object) -> Diagnosis | None:
    """Return why the API server refuses further pods of the Deployment; None if it does not."""
    failure = condition(deployment, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    text = failure.get("message") or failure.get("reason") or "no reason was given"
    what = f"the API server refuses pods of Deployment {deployment['metadata']['name']}"
    return Diagnosis(_reason(text) or "PodRefused", f"{what}: {text}")


def _reason(text: str) -> str | None:
    if "exceeded quota" in text:
        return QUOTA_EXCEEDED
    if "failed calling webhook" in text:
        return "AdmissionWebhookFailed"
    if "denied" in text and any(words in text for words in _DENIED):
        return "AdmissionDenied"
    return None
