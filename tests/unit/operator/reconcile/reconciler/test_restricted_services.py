"""A restricted operator creates nothing from a spec that requests too much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.restrictions import Restrictions
from support.operator.simulation.simulated_service import NAME, Service

SPEC: dict[str, Any] = {
    "model": {"uri": "hf://o/m"},
    "decode": {"replicas": 2},
    "progressDeadlineSeconds": 60,
}
PRIVILEGED: Object = {
    "spec": {"containers": [{"name": "engine", "securityContext": {"privileged": True}}]}
}
HOST_PATH: Object = {"spec": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}}
EXPERTS: Object = {"replicas": 2, "parallelism": {"expert": True}}


@pytest.fixture
def service() -> Iterator[Service]:
    with closing(Service(Restrictions())) as made:
        yield made


def member_names(service: Service) -> set[str]:
    return {pod["metadata"]["name"].removeprefix(f"{NAME}-") for pod in service.pods()}


def revision(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_REVISION])


def has_workload(service: Service) -> bool:
    """Return whether the service has an object from which a pod is made."""
    return bool(service.pods() or service.server.list("deployments.apps"))


def restrict(service: Service, restrictions: Restrictions | None) -> None:
    service.restrictions = restrictions
    service.operator_restarts()


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {"template": PRIVILEGED}},
        {"decode": {"template": HOST_PATH}},
        {"decode": {**EXPERTS, "template": PRIVILEGED}},
        {"prefill": {"template": HOST_PATH}},
        {"gateway": {"template": {"spec": {"hostNetwork": True}}}},
        {"model": {"uri": "file:///var"}},
        {"gateway": {"ingress": {"host": "a.example", "annotations": {"a.example/snippet": "x"}}}},
    ],
    ids=str,
)
def test_a_new_service_that_is_refused_gets_no_pod(service: Service, spec: Object) -> None:
    service.create({**SPEC, **spec})
    service.rounds(4)
    condition = service.condition()
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert "the operator's setting" in condition["message"]
    assert not has_workload(service)
    restrict(service, None)
    service.rounds(4)
    assert has_workload(service), "an unrestricted operator must create what is missing"


def test_an_edit_that_is_refused_leaves_the_pods_in_service(service: Service) -> None:
    service.create(SPEC)
    service.settle()
    before = service.pods()
    service.patch({"decode": {"template": PRIVILEGED}})
    service.rounds(4)
    assert service.condition()["reason"] == "InvalidSpec"
    assert service.pods() == before
    service.nodes.pod_vanishes(f"{NAME}-decode-1")
    service.rounds(4)
    (made,) = [pod for pod in service.pods() if pod["metadata"]["name"] == f"{NAME}-decode-1"]
    assert "privileged" not in str(made), "the pod must be of the spec before the edit"
    service.patch({"decode": {"template": None}})
    service.settle()


def test_a_restriction_keeps_present_pods_and_creates_no_further_ones(service: Service) -> None:
    restrict(service, None)
    service.create({**SPEC, "decode": {"replicas": 2, "template": HOST_PATH}})
    service.settle()
    restrict(service, Restrictions())
    service.rounds(4)
    assert service.condition()["reason"] == "InvalidSpec"
    assert member_names(service) == {"decode-0", "decode-1"}
    service.nodes.pod_vanishes(f"{NAME}-decode-1")
    service.patch({"decode": {"replicas": 3}})
    service.rounds(4)
    assert member_names(service) == {"decode-0"}
    service.patch({"decode": {"template": None}})
    service.settle()


@pytest.mark.parametrize("restrictions", [None, Restrictions()])
def test_a_previous_revision_that_is_refused_is_not_restored(
    service: Service, restrictions: Restrictions | None
) -> None:
    restrict(service, None)
    service.create({**SPEC, "decode": {"replicas": 2, "template": HOST_PATH}})
    service.settle()
    (old,) = {revision(pod) for pod in service.pods()}
    restrict(service, restrictions)
    env = [{"name": "BROKEN", "value": "1"}]  # pods of this revision do not get ready
    broken = {"spec": {"volumes": None, "containers": [{"name": "engine", "env": env}]}}
    service.patch({"decode": {"template": broken}})
    service.rounds(20)
    for pod in service.pods():
        if revision(pod) == old:
            service.nodes.pod_vanishes(pod["metadata"]["name"])
    service.rounds(20)
    is_restored = old in {revision(pod) for pod in service.pods()}
    assert is_restored == (restrictions is None)


@pytest.mark.parametrize("account", ["engine", "gateway"])
def test_no_pod_runs_under_an_account_of_another_owner(service: Service, account: str) -> None:
    """Another client's account may have rights that creators of LLMServices must not get."""
    theirs = {"metadata": {"name": f"{NAME}-{account}"}}
    service.server.put(theirs, "serviceaccounts")
    service.create(SPEC)
    service.rounds(4)
    assert service.condition()["reason"] == "NameConflict"
    assert f"ServiceAccount {NAME}-{account} exists" in service.condition()["message"]
    if account == "engine":
        assert not service.pods()
    else:
        assert not service.server.list("deployments.apps")
    service.server.remove("serviceaccounts", f"{NAME}-{account}")
    service.settle()


@pytest.mark.parametrize("kind", ["ServiceAccount", "Role", "RoleBinding"])
def test_the_gateway_does_not_get_the_rights_of_another_owner(service: Service, kind: str) -> None:
    plurals = {
        "ServiceAccount": "serviceaccounts",
        "Role": "roles.rbac.authorization.k8s.io",
        "RoleBinding": "rolebindings.rbac.authorization.k8s.io",
    }
    name = f"{NAME}-gateway"
    service.server.put({"metadata": {"name": name}}, plurals[kind])
    service.create(SPEC)
    service.rounds(4)
    assert f"{kind} {name} exists" in service.condition()["message"]
    bound = [each for each in service.server.list(plurals["RoleBinding"]) if "roleRef" in each]
    assert not bound, "the binding would give the rights of the Role to the image of the service"
    assert not service.server.list("deployments.apps")
    service.server.remove(plurals[kind], name)
    service.settle()
