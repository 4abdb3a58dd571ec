"""Pods that the API server refuses, for example because of a quota or an admission webhook.

The operator tries to create a refused pod again after a delay, which doubles with every refusal.
The condition of the pod's group reports the refusal, and the other pods keep serving.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.plan.plan_group import GroupPlan

QUOTA_EXCEEDED = "QuotaExceeded"
POD_REFUSED = "PodRefused"
FIRST_DELAY_S = 1.0  # delay after the first refusal
LAST_DELAY_S = 30.0  # longest delay
_DENIED = ("admission webhook", "ValidatingAdmissionPolicy")
#: HTTP codes of refusals that an immediate retry does not change.
_REFUSING = (400, 403, 422)


class PodRefusal(msgspec.Struct, frozen=True):
    """Why the API server refuses a pod: the reason and the message of a condition."""

    reason: str
    message: str


class _Refused(msgspec.Struct, frozen=True):
    """The last refusal of a pod of one group, and the time of the next attempt to create pods."""

    revision: str
    refusal: PodRefusal
    delay_s: float
    retry_at: datetime


class RefusedPods:
    """The last refusal of a pod, for each service and role.

    Refusals are kept in memory only, so a new operator process tries again without a delay.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[names.Key, names.Role], _Refused] = {}

    def delay_creation(
        self, key: names.Key, role: names.Role, revision: str, plan: GroupPlan, now: datetime
    ) -> GroupPlan:
        """Return `plan`; during the retry delay after a refusal, a copy that creates no pods.

        The refusal is dropped if the plan creates no pod or the revision has changed.
        """
        refused = self._refused.get((key, role))
        if refused is None:
            return plan
        if not (plan.create or plan.restore) or refused.revision != revision:
            del self._refused[key, role]
            return plan
        if now >= refused.retry_at:
            return plan
        wait_s = (refused.retry_at - now).total_seconds()
        return msgspec.structs.replace(
            plan, create=[], restore=[], revisit_s=min(wait_s, plan.revisit_s or wait_s)
        )

    def record(
        self,
        key: names.Key,
        role: names.Role,
        revision: str,
        refusal: PodRefusal | None,
        now: datetime,
    ) -> float | None:
        """Record whether the API server refused a pod of the group in the current reconcile.

        Args:
            refusal: the refusal; None if no pod was refused.

        Returns:
            The retry delay in seconds; None if no pod was refused.
        """
        before = self._refused.pop((key, role), None)
        if refusal is None:
            return None
        delay_s = min(LAST_DELAY_S, before.delay_s * 2) if before else FIRST_DELAY_S
        self._refused[key, role] = _Refused(
            revision, refusal, delay_s, now + timedelta(seconds=delay_s)
        )
        return delay_s

    def get(self, key: names.Key, role: names.Role) -> PodRefusal | None:
        """Return the last recorded refusal of a pod of `role`; None if there is none."""
        refused = self._refused.get((key, role))
        return refused.refusal if refused else None

    def forget(self, key: names.Key) -> None:
        """Drop the refusals of a deleted service."""
        for role in names.MEMBER_ROLES:
            self._refused.pop((key, role), None)


def refusal_of(error: KubeError, pod: str) -> PodRefusal | None:
    """Return the refusal of `pod` that `error` reports.

    The result is None if the error has another cause, such as an overloaded API server.
    """
    reason = refusal_reason(str(error)) or (POD_REFUSED if error.status in _REFUSING else None)
    return PodRefusal(reason, f"the API server refuses pod {pod}: {error}") if reason else None


def refusal_reason(text: str) -> str | None:
    """Return the condition reason for a known error message of the API server, else None."""
    if "exceeded quota" in text:
        return QUOTA_EXCEEDED
    if "failed calling webhook" in text:
        return "AdmissionWebhookFailed"
    if "denied" in text and any(words in text for words in _DENIED):
        return "AdmissionDenied"
    return None
