"""`resources` and `template` of users are applied to the pods of every role."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.names import GROUP, ConfiguredRole
from support.operator.services import resolved

ROLES: list[tuple[ConfiguredRole, str]] = [
    ("prefill", "engine"),
    ("decode", "engine"),
    ("gateway", "gateway"),
]
GPU = {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}, "requests": {"cpu": "4"}}


def pod_spec(role: ConfiguredRole, **group: Any) -> Object:
    service = resolved(**{role: group})
    if role == "gateway":
        spec: Object = gateway_deployment.build(service)["spec"]["template"]["spec"]
        return spec
    built: Object = MemberTemplate(service, role).pod(0)["spec"]
    return built


def main_container(spec: Object, name: str) -> Object:
    (found,) = [container for container in spec["containers"] if container["name"] == name]
    return dict(found)


@pytest.mark.parametrize(("role", "name"), ROLES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodeSelector", {"gpu": "h200"}),
        ("tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
        (
            "affinity",
            {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
                }
            },
        ),
        (
            "topologySpreadConstraints",
            [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        ),
        ("priorityClassName", "high"),
        ("runtimeClassName", "nvidia"),
        ("imagePullSecrets", [{"name": "registry"}]),
        ("schedulerName", "volcano"),
        ("hostAliases", [{"ip": "10.0.0.9", "hostnames": ["models"]}]),
        ("initContainers", [{"name": "warm", "image": "busybox"}]),
        ("terminationGracePeriodSeconds", 7),
    ],
)
def test_a_template_sets_fields_of_the_pod(
    role: ConfiguredRole, name: str, field: str, value: Any
) -> None:
    assert pod_spec(role, template={"spec": {field: value}})[field] == value


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_resources_and_a_template_set_devices(role: ConfiguredRole, name: str) -> None:
    assert main_container(pod_spec(role, resources=GPU), name)["resources"] == GPU
    template = {
        "spec": {"containers": [{"name": name, "resources": {"limits": {"nvidia.com/gpu": 4}}}]}
    }
    assert main_container(pod_spec(role, template=template), name)["resources"] == {
        "limits": {"nvidia.com/gpu": 4}
    }
    both = main_container(pod_spec(role, resources=GPU, template=template), name)["resources"]
    assert both == {**GPU, "limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}}, (
        "the template must take precedence"
    )


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_volumes_of_a_template_are_added(role: ConfiguredRole, name: str) -> None:
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    before = pod_spec(role)
    spec = pod_spec(
        role,
        template={
            "spec": {"volumes": [shared], "containers": [{"name": name, "volumeMounts": [mount]}]}
        },
    )
    assert spec["volumes"] == [*before["volumes"], shared]
    mounts = main_container(spec, name)["volumeMounts"]
    assert mounts == [*main_container(before, name)["volumeMounts"], mount]


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_variables_of_a_template_are_added_or_replaced_except_the_pods_identity(
    role: ConfiguredRole, name: str
) -> None:
    secret = {"name": "XDG_CACHE_HOME", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    wanted = [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "POD_IP", "value": "0.0.0.0"},
        secret,
    ]
    spec = pod_spec(role, template={"spec": {"containers": [{"name": name, "env": wanted}]}})
    env = {item["name"]: item for item in main_container(spec, name)["env"]}
    assert env["NCCL_DEBUG"]["value"] == "INFO"
    assert env["XDG_CACHE_HOME"] == secret, "the API server refuses a value with a reference"
    own = {item["name"]: item for item in main_container(pod_spec(role), name)["env"]}
    for variable in ("POD_IP", "POD_NAME", "POD_NAMESPACE"):
        assert env[variable] == own[variable]
    assert next(iter(env)) == "POD_IP", (
        "the variable must come first, because others may refer to it"
    )
    without = main_container(
        pod_spec(role, template={"spec": {"containers": [{"name": name, "env": None}]}}), name
    )
    assert {item["name"] for item in without["env"]} == {"POD_IP", "POD_NAME", "POD_NAMESPACE"}


def test_a_template_changes_fields_but_not_the_labels_of_selectors() -> None:
    template = {
        "metadata": {
            "labels": {f"{GROUP}/role": "mine", "team": "a"},
            "annotations": {"note": "b"},
        },
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "containers": [
                {"name": "engine", "env": [{"name": "MORE", "value": "1"}]},
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    resources = {"limits": {"memory": "1Gi"}}
    pod = MemberTemplate(
        resolved(decode={"template": template, "resources": resources}), "decode"
    ).pod(0)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][f"{GROUP}/role"] == "decode"
    assert pod["metadata"]["annotations"] == {"note": "b"}
    engine, sidecar = pod["spec"]["containers"]
    env = [item["name"] for item in engine["env"]]
    assert env[0] == "POD_IP"
    assert env[-1] == "MORE"
    assert engine["resources"] == resources
    assert sidecar == {"name": "sidecar", "image": "s"}


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": None}, "spec"),
        ({"spec": []}, "spec"),
        ({"metadata": None}, "metadata"),
        ({"metadata": {"labels": None}}, "metadata.labels"),
        ({"metadata": {"labels": "x"}}, "metadata.labels"),
        ({"spec": {"containers": [{"name": ["engine"]}]}}, "spec.containers"),
        ({"spec": {"containers": None}}, "spec.containers"),
    ],
)
def test_a_template_that_removes_required_fields_is_refused_with_the_field(
    template: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"^decode\.template\.{field}\b"):
        MemberTemplate(resolved(decode={"template": template}), "decode")
