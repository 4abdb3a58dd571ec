"""Pods that the API server refuses: the reason is reported and the creation is retried."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from baton_kube.client import KubeError, Object
from baton_operator.names import Key
from baton_operator.plan.plan_group import GroupPlan
from baton_operator.plan.refused_pods import LAST_DELAY_S, PodRefusal, RefusedPods, refusal_of
from support.operator.services import NOW
from support.operator.simulation.api_server import NAMESPACE
from support.operator.simulation.simulated_service import Service

QUOTA = (
    'pods "demo-decode-2" is forbidden: exceeded quota: gpus, '
    "requested: requests.nvidia.com/gpu=1, "
    "used: requests.nvidia.com/gpu=2, limited: requests.nvidia.com/gpu=2"
)
WEBHOOK = 'admission webhook "images.example.com" denied the request: image of an unknown registry'
CALL_FAILED = (
    'Internal error occurred: failed calling webhook "images.example.com": connection refused'
)
SPEC: Object = {
    "model": {"uri": "file:///models/x"},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 2},
    "gateway": {"replicas": 1},
}


class Quota:
    """A ResourceQuota for member pods of one role."""

    def __init__(self, simulated: Service, role: str, limit: int) -> None:
        self.simulated, self.role, self.limit = simulated, role, limit
        self.asked = 0
        self._request = simulated.server.request
        simulated.server.request = self.request

    def request(
        self, method: str, path: str, body: Any, query: dict[str, str], content_type: str
    ) -> Any:
        if (
            method == "POST"
            and path.endswith("/pods")
            and f"-{self.role}-" in body["metadata"].get("name", "")
        ):
            self.asked += 1
            if (
                sum(f"-{self.role}-" in pod["metadata"]["name"] for pod in self.simulated.pods())
                >= self.limit
            ):
                raise KubeError(403, "Forbidden", QUOTA)
        return self._request(method, path, body, query, content_type)


@pytest.fixture
def simulated() -> Iterator[Service]:
    found = Service()
    yield found
    found.close()


def conditions_of(simulated: Service) -> dict[str, tuple[str, str]]:
    conditions = simulated.object()["status"]["conditions"]
    return {each["type"]: (each["status"], each["reason"]) for each in conditions}


def test_a_quota_is_reported_for_its_group_and_the_others_become_ready(simulated: Service) -> None:
    Quota(simulated, "decode", limit=1)
    simulated.create(SPEC)
    simulated.rounds(10)
    conditions = conditions_of(simulated)
    assert conditions["DecodeReady"] == conditions["Ready"] == ("False", "QuotaExceeded")
    assert conditions["PrefillReady"] == conditions["GatewayReady"] == ("True", "PodsReady")
    status = simulated.object()["status"]
    assert (status["decode"]["ready"], status["prefill"]["ready"]) == (1, 1)
    message = next(
        each["message"] for each in status["conditions"] if each["type"] == "DecodeReady"
    )
    assert "requests.nvidia.com/gpu=2" in message
    assert "1 of 2 decode pods are ready" in message


def test_a_surge_beyond_the_quota_waits_while_the_old_pods_serve(
    simulated: Service,
) -> None:
    quota = Quota(simulated, "decode", limit=2)
    simulated.create(SPEC)
    simulated.settle()
    simulated.patch({"decode": {"template": {"metadata": {"labels": {"another": "revision"}}}}})
    simulated.rounds(20)
    conditions = conditions_of(simulated)
    assert conditions["DecodeReady"] == ("False", "QuotaExceeded")
    assert conditions["Updating"] == ("True", "WaitingForCapacity")
    assert simulated.object()["status"]["decode"]["ready"] == 2
    quota.limit = 3
    simulated.settle()


def test_a_refused_pod_is_retried_with_backoff(simulated: Service) -> None:
    quota = Quota(simulated, "decode", limit=0)
    simulated.create(SPEC)
    for _ in range(120):
        simulated.reconcile()
        simulated.passes(1.0)
    assert 5 <= quota.asked <= 10, "expected attempts after 0, 1, 3, 7, 15, 31, 61 and 91 s"


def test_a_changed_template_is_tried_at_once_and_unwanted_pods_are_dropped() -> None:
    key, wanted = Key(NAMESPACE, "demo"), GroupPlan(create=[0])
    refusals = RefusedPods()
    assert refusals.record(key, "decode", "a", PodRefusal("QuotaExceeded", QUOTA), NOW) == 1.0
    held = refusals.delay_creation(key, "decode", "a", wanted, NOW)
    assert (held.create, held.revisit_s) == ([], 1.0)
    assert refusals.delay_creation(key, "decode", "a", wanted, NOW + timedelta(seconds=1)) == wanted
    assert refusals.delay_creation(key, "decode", "b", wanted, NOW) == wanted
    assert refusals.get(key, "decode") is None
    for _ in range(40):
        delay_s = refusals.record(key, "decode", "a", PodRefusal("QuotaExceeded", QUOTA), NOW)
    assert delay_s == LAST_DELAY_S
    assert (
        refusals.delay_creation(key, "decode", "a", GroupPlan(revisit_s=0.5), NOW).revisit_s == 0.5
    )
    assert refusals.get(key, "decode") is None
    refusals.record(key, "decode", "a", PodRefusal("QuotaExceeded", QUOTA), NOW)
    refusals.forget(key)
    assert refusals.get(key, "decode") is None


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, QUOTA, "QuotaExceeded"),
        (400, WEBHOOK, "AdmissionDenied"),
        (
            422,
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            "AdmissionDenied",
        ),
        (500, CALL_FAILED, "AdmissionWebhookFailed"),
        (
            403,
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes',
            "PodRefused",
        ),
        (422, 'Pod "x" is invalid: spec.containers[0].image: Required value', "PodRefused"),
        (500, "etcdserver: leader changed", None),
        (429, "too many requests", None),
        (409, 'Operation cannot be fulfilled on resourcequotas "gpus"', None),
    ],
)
def test_errors_of_the_pod_are_distinguished_from_errors_of_the_server(
    status: int, message: str, reason: str | None
) -> None:
    found = refusal_of(KubeError(status, "", message), "demo-decode-2")
    assert (found.reason if found else None) == reason
    assert found is None or message in found.message
