"""Missing Secrets and ConfigMaps: found without reading them, and reported per group."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kube.client import KubeError, Object
from baton_operator.kube.objects import Kube
from baton_operator.observe.observation import Reference
from baton_operator.status.missing_references import may_lack_objects, references
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.status_probes import find_missing
from support.operator.services import NOW, observed, pod, resolved, service

CREATING = {"waiting": {"reason": "ContainerCreating"}}
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
CONFIG_ERROR = {
    "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
}
KEYS = Reference("Secret", "keys")
API_KEYS = {"name": "api-keys", "secret": {"secretName": "keys"}}


def waiting(name: str = "demo-gateway-0", state: Object = CREATING, **spec: Any) -> Object:
    found = pod(name, state=state, phase="Pending")
    found["spec"] = {
        "nodeName": "node",
        "volumes": [API_KEYS],
        "containers": [{"name": "gateway"}],
        **spec,
    }
    return found


class Objects(Kube):
    """A fake API server with objects by path."""

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        client: Any = self
        super().__init__(client)
        self.names, self.error = names, error
        self.asked: list[tuple[str, bool]] = []

    async def get(self, path: str, *, metadata_only: bool, budget: Any) -> Any:
        self.asked.append((path, metadata_only))
        if self.error:
            raise self.error
        if path.rpartition("/")[2] not in self.names:
            raise KubeError(404, "NotFound", f"{path} not found")
        return {"kind": "PartialObjectMetadata", "metadata": {}}


def condition_of(type_: str, status: Any) -> tuple[str, str, str]:
    (found,) = [each for each in status.conditions or [] if each.type == type_]
    return found.status, found.reason, found.message


def test_optional_references_of_a_pod_may_be_missing() -> None:
    container = {
        "name": "engine",
        "envFrom": [
            {"secretRef": {"name": "hub"}},
            {"configMapRef": {"name": "maybe", "optional": True}},
        ],
        "env": [
            {"name": "A", "value": "a"},
            {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "c"}}},
            {
                "name": "D",
                "valueFrom": {"secretKeyRef": {"name": "perhaps", "key": "d", "optional": True}},
            },
        ],
    }
    projected = {
        "sources": [{"secret": {"name": "part"}}, {"serviceAccountToken": {"path": "token"}}]
    }
    volumes = [
        API_KEYS,
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": "config"}},
        {"name": "extra", "secret": {"secretName": "unneeded", "optional": True}},
        {"name": "all", "projected": projected},
        {"name": "token", "secret": {"secretName": "of-the-account"}},
    ]
    container["volumeMounts"] = [
        {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    ]
    found = references(
        waiting(volumes=volumes, initContainers=[{"name": "model"}], containers=[container])
    )
    assert found == {
        KEYS: "volume api-keys",
        Reference("ConfigMap", "config"): "volume config",
        Reference("Secret", "part"): "volume all",
        Reference("Secret", "hub"): "environment of container engine",
        Reference("ConfigMap", "settings"): "environment of container engine",
    }


@pytest.mark.parametrize(
    ("case", "lacks"),
    [
        (waiting(), True),
        (waiting(state=INITIALIZING), True),
        (waiting(state=CONFIG_ERROR), True),
        (waiting(nodeName=None), False),
        (waiting(state={"running": {}}), False),
        (
            pod(state={"waiting": {"reason": "CrashLoopBackOff"}}, last={"exitCode": 1})
            | {"spec": {"nodeName": "n"}},
            False,
        ),
        ({**waiting(), "status": {"phase": "Failed"}}, False),
        ({**waiting(), "status": {}}, True),
    ],
    ids=[
        "creating",
        "initializing",
        "config error",
        "unscheduled",
        "running",
        "ran before",
        "failed",
        "not looked at",
    ],
)
def test_only_pods_waiting_on_their_node_are_checked(case: Object, lacks: bool) -> None:
    assert may_lack_objects(case) is lacks


async def test_only_the_existence_of_objects_is_requested() -> None:
    kube = Objects("there")
    pods = [
        waiting("a"),
        waiting("b", volumes=[{"name": "v", "secret": {"secretName": "there"}}, API_KEYS]),
        waiting("c", volumes=[{"name": "config", "configMap": {"name": "ours"}}]),
        waiting(
            "d", state={"running": {}}, volumes=[{"name": "v", "secret": {"secretName": "unasked"}}]
        ),
    ]
    assert await find_missing(kube, "team", pods, {Reference("ConfigMap", "ours")}) == {KEYS}
    assert sorted(path for path, _ in kube.asked) == [
        "/api/v1/namespaces/team/secrets/keys",
        "/api/v1/namespaces/team/secrets/there",
    ]
    assert all(metadata_only for _, metadata_only in kube.asked)


@pytest.mark.parametrize(
    "error", [KubeError(403, "Forbidden", "no"), KubeError(500, "", "no"), ConnectionError("no")]
)
async def test_an_unreadable_object_is_not_reported_as_missing(error: Exception) -> None:
    assert await find_missing(Objects(error=error), "team", [waiting()], set()) == frozenset()


def test_a_missing_object_is_reported_for_its_group_until_it_exists() -> None:
    gateway = ReportedGroup(
        role="gateway", desired=1, pods=[waiting()], updated=False, missing=frozenset({KEYS})
    )
    status = report(observed(), resolved(), {"gateway": gateway}, problem=None, now=NOW)
    condition, reason, message = condition_of("GatewayReady", status)
    assert (condition, reason) == ("False", "SecretNotFound")
    assert "pod demo-gateway-0: Secret keys does not exist" in message
    assert "volume api-keys" in message
    assert condition_of("Ready", status)[:2] == ("False", "SecretNotFound")
    assert [each.reason for each in new_failures(service(), status)] == ["SecretNotFound"]
    there = ReportedGroup(role="gateway", desired=1, pods=[waiting()], updated=False)
    status = report(observed(), resolved(), {"gateway": there}, problem=None, now=NOW)
    assert condition_of("GatewayReady", status)[:2] == ("False", "Starting")


def test_a_missing_secret_takes_precedence_over_the_containers_error() -> None:
    hub = Reference("Secret", "hub")
    model = {"name": "model", "envFrom": [{"secretRef": {"name": "hub"}}]}
    member = waiting(
        "demo-decode-0", state=INITIALIZING, volumes=[], initContainers=[model], containers=[]
    )
    member["status"]["initContainerStatuses"] = [{"name": "model", "state": CONFIG_ERROR}]
    group = ReportedGroup(
        role="decode", desired=1, pods=[member], revision="new", missing=frozenset({hub})
    )
    status = report(observed(), resolved(), {"decode": group}, problem=None, now=NOW)
    condition, reason, message = condition_of("DecodeReady", status)
    assert (condition, reason) == ("False", "SecretNotFound")
    assert "environment of container model" in message


def test_a_rollout_names_the_missing_object_of_its_new_pod() -> None:
    old = pod("demo-decode-1", ready=True, revision="old")
    settings = Reference("ConfigMap", "settings")
    volumes = [{"name": "settings", "configMap": {"name": "settings"}}]
    new = waiting("demo-decode-0", volumes=volumes)
    group = ReportedGroup(
        role="decode", desired=1, pods=[old, new], revision="new", missing=frozenset({settings})
    )
    status = report(observed(), resolved(), {"decode": group}, problem=None, now=NOW)
    assert condition_of("DecodeReady", status)[1] == "ConfigMapNotFound"
    assert condition_of("Updating", status)[:2] == ("True", "Starting")
    assert "ConfigMap settings does not exist" in condition_of("Updating", status)[2]
