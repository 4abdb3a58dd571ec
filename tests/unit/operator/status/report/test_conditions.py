"""Conditions of a service, from its groups."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.api.crd import custom_resource_definition
from baton_operator.api.llmservice import Condition
from baton_operator.api.spec_groups import AutoscalingStatus
from baton_operator.reconcile_errors import InvalidSpec, Problem
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup, refusal_of_deployment
from pocketkube.apiserver.serving.tables import json_path
from support.operator.reported_groups import BACK_OFF, FATAL, QUOTA, decode, gateway, prefill
from support.operator.services import NOW, observed, pod, resolved, service


def conditions(
    before: Object, groups: dict[Any, ReportedGroup], problem: Problem | None = None
) -> dict[str, Condition]:
    status = report(
        observed(before, cluster_ip="10.0.0.7"), resolved(), groups, problem=problem, now=NOW
    )
    return {condition.type: condition for condition in status.conditions or []}


ALL_READY = {
    "prefill": ReportedGroup(role="prefill", desired=0, pods=[]),
    "decode": decode([pod(ready=True)]),
    "gateway": ReportedGroup(role="gateway", desired=1, pods=[pod(ready=True)]),
}


def test_a_service_is_ready_if_every_group_is() -> None:
    assert conditions(service(), ALL_READY)["Ready"].reason == "AllGroupsReady"
    failing = ALL_READY | {"decode": decode([pod(state=BACK_OFF, last=FATAL)])}
    ready = conditions(service(), failing)["Ready"]
    assert (ready.status, ready.reason) == ("False", "ModelNotFound")


def sleeping(autoscaling: AutoscalingStatus | None) -> ReportedGroup:
    return ReportedGroup(role="decode", desired=0, pods=[], revision="new", autoscaling=autoscaling)


OLD_POD = pod(ready=True, revision="old")
BROKEN_POD = pod("demo-decode-1", state=BACK_OFF, last=FATAL)
ASLEEP = AutoscalingStatus(size=0, recommended=0, reason="OnTarget", message="no request waits")
AVAILABILITY: dict[str, tuple[dict[str, ReportedGroup], str, str, str, str]] = {
    "healthy": (
        {}, "True", "True", "MinimumPodsReady", "ready pods: 1 gateway, 1 decode",
    ),
    "an old decode pod during a rollout": (
        {"decode": decode([OLD_POD, pod("demo-decode-1")])}, "False", "True", "MinimumPodsReady",
        "1 decode",
    ),
    "an old gateway pod during a rollout": (
        {"gateway": gateway([OLD_POD, pod("demo-gateway-1")])}, "False", "True",
        "MinimumPodsReady", "1 gateway",
    ),
    "an old pod beside a broken new revision": (
        {"decode": decode([OLD_POD, BROKEN_POD])}, "False", "True", "MinimumPodsReady", "1 decode",
    ),
    "one of two decode pods": (
        {"decode": decode([pod(ready=True), BROKEN_POD], 2)}, "False", "True", "MinimumPodsReady",
        "1 decode",
    ),
    "no prefill pod": (
        {"prefill": prefill([pod()])}, "False", "True", "MinimumPodsReady",
        "no prefill pod is ready, so decode pods compute the prompts",
    ),
    "no gateway pod": (
        {"gateway": gateway([pod(state=BACK_OFF, last=FATAL)])}, "False", "False",
        "ModelNotFound", "0 of 1 gateway pods",
    ),
    "no decode pod": (
        {"decode": decode([pod()])}, "False", "False", "Starting", "0 of 1 decode pods",
    ),
    "only a decode pod that drains": (
        {"decode": decode([pod(ready=True, draining=True)])}, "False", "False", "Draining",
        "0 of 1 decode pods",
    ),
    "only a decode pod that sleeps": (
        {"decode": decode([pod("demo-decode-a")], a="Asleep")}, "False", "False", "EngineAsleep",
        "pod demo-decode-a is asleep",
    ),
    "scaled to zero by hand": (
        {"decode": sleeping(None)}, "False", "False", "ScaledToZero", "set spec.decode.replicas",
    ),
    "scaled to zero by the autoscaler": (
        {"decode": sleeping(ASLEEP)}, "True", "True", "ScaledToZero", "the next request starts",
    ),
    "scaled to zero by the autoscaler, without a gateway pod": (
        {"decode": sleeping(ASLEEP), "gateway": gateway([])}, "False", "False", "Starting",
        "0 of 1 gateway pods",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "ready", "status", "reason", "text"),
    AVAILABILITY.values(),
    ids=AVAILABILITY.keys(),
)
def test_a_service_is_available_while_it_answers_requests(
    changed: dict[str, ReportedGroup], ready: str, status: str, reason: str, text: str
) -> None:
    found = conditions(service(), ALL_READY | changed)
    available = found["Available"]
    assert (found["Ready"].status, available.status, available.reason) == (ready, status, reason)
    assert text in available.message


def test_kubectl_shows_that_a_service_is_available_although_it_is_not_ready() -> None:
    groups = ALL_READY | {"decode": decode([pod(ready=True), BROKEN_POD], 2)}
    status = report(observed(cluster_ip="10.0.0.7"), resolved(), groups, problem=None, now=NOW)
    shown = service() | {"status": msgspec.to_builtins(status)}
    version = custom_resource_definition()["spec"]["versions"][0]
    columns = {
        column["name"]: json_path(shown, column["jsonPath"])
        for column in version["additionalPrinterColumns"]
        if column.get("priority", 0) == 0 and column["name"] != "Age"
    }
    assert columns == {
        "Ready": "False",
        "Reason": "ModelNotFound",
        "Available": "True",
        "Prefill": 0,
        "Decode": 1,
        "Endpoint": status.endpoint,
    }
    assert status.endpoint


def test_a_problem_of_the_reconcile_leaves_the_service_available() -> None:
    found = conditions(service(), ALL_READY, InvalidSpec("no such field"))
    assert (found["Ready"].status, found["Available"].status) == ("False", "True")


def test_a_failure_outranks_a_group_that_merely_starts() -> None:
    groups = ALL_READY | {
        "prefill": ReportedGroup(role="prefill", desired=1, pods=[], revision="new"),
        "decode": decode([pod(state=BACK_OFF, last=FATAL)]),
    }
    assert conditions(service(), groups)["Ready"].reason == "ModelNotFound"


def test_all_conditions_exist_after_the_first_reconcile() -> None:
    reported = conditions(service(), {}, InvalidSpec("no such field"))
    assert set(reported) == {
        "Ready",
        "Available",
        "ModelAvailable",
        "PrefillReady",
        "DecodeReady",
        "GatewayReady",
        "Updating",
    }
    assert reported["DecodeReady"].status == reported["Available"].status == "Unknown"
    assert (reported["Ready"].status, reported["Ready"].reason) == ("False", "InvalidSpec")


def test_the_transition_time_changes_only_with_the_status() -> None:
    earlier = "2020-01-01T00:00:00Z"
    before = [
        {"type": "Ready", "status": "False", "reason": "Starting", "lastTransitionTime": earlier}
    ]
    still = conditions(
        service(before, generation=5),
        ALL_READY | {"decode": decode([pod(state=BACK_OFF, last=FATAL)])},
    )
    assert still["Ready"].last_transition_time == earlier
    assert still["Ready"].observed_generation == 5
    assert (
        conditions(service(before), ALL_READY)["Ready"].last_transition_time
        == "2026-01-02T03:04:05Z"
    )


def test_a_failure_causes_one_event() -> None:
    groups = ALL_READY | {"decode": decode([pod(state=BACK_OFF, last=FATAL)])}
    status = report(observed(), resolved(), groups, problem=None, now=NOW)
    assert [c.reason for c in new_failures(service(), status)] == ["ModelNotFound"]
    known = service(
        [
            {
                "type": "DecodeReady",
                "status": "False",
                "reason": "ModelNotFound",
                "lastTransitionTime": "x",
            }
        ]
    )
    assert new_failures(known, status) == []


@pytest.mark.parametrize("transport", ["ucx", "nixl", "auto", "tcp", "shm"])
@pytest.mark.parametrize("has_policy", [True, False])
@pytest.mark.parametrize("has_prefill", [True, False])
def test_one_event_warns_of_kv_transfers_without_authentication(
    transport: str, has_policy: bool, has_prefill: bool
) -> None:
    wanted = resolved(
        security={"networkPolicy": has_policy},
        kvTransfer={"transport": transport},
        **({"prefill": {}} if has_prefill else {}),
    )
    status = report(observed(), wanted, ALL_READY, problem=None, now=NOW)
    found = {each.type: each for each in status.conditions or []}
    assert found["Ready"].status == "True", "the warning must not affect readiness"
    if has_policy or not has_prefill or transport in ("tcp", "shm"):
        assert "KVTransferProtected" not in found
        assert new_failures(service(), status) == []
        return
    warning = found["KVTransferProtected"]
    assert (warning.status, warning.reason) == ("False", "NetworkPolicyOff")
    assert all(
        word in warning.message
        for word in (transport, "security.networkPolicy", "kvTransfer.transport to tcp")
    )
    assert ("may listen" in warning.message) == (transport == "auto")
    assert new_failures(service(), status) == [warning]
    known = {
        "type": warning.type,
        "status": "False",
        "reason": warning.reason,
        "lastTransitionTime": "x",
    }
    assert new_failures(service([known]), status) == []


def test_counts_and_endpoints() -> None:
    groups = ALL_READY | {
        "decode": decode([pod(ready=True), pod("demo-decode-1", ready=True, draining=True)])
    }
    wanted = resolved(gateway={"ingress": {"host": "demo.localhost"}})
    status = report(observed(cluster_ip="10.0.0.7"), wanted, groups, problem=None, now=NOW)
    assert (status.decode.desired, status.decode.ready, status.decode.replicas) == (1, 1, 2)
    assert (status.endpoint, status.ingress_endpoint) == (
        "http://10.0.0.7",
        "http://demo.localhost",
    )


def test_a_refused_pod_of_a_deployment_is_the_reason_of_its_group() -> None:
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": QUOTA,
    }
    deployment = {"metadata": {"name": "demo-gateway"}, "status": {"conditions": [failure]}}
    found = refusal_of_deployment(deployment)
    assert found.reason == "QuotaExceeded"
    assert refusal_of_deployment({"metadata": {"name": "demo-gateway"}}) is None
    gateway = ReportedGroup(role="gateway", desired=1, pods=[], updated=False, refusal=found)
    status = report(observed(), resolved(), {"gateway": gateway}, problem=None, now=NOW)
    (ready,) = [each for each in status.conditions or [] if each.type == "GatewayReady"]
    assert (ready.status, ready.reason) == ("False", "QuotaExceeded")
    assert [each.reason for each in new_failures(service(), status)] == ["QuotaExceeded"]
