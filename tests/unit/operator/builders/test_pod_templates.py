"""`resources` and `template` of users are applied to the pods of every role."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders import gateway
from baton_operator.builders.member import MemberTemplate
from baton_operator.names import ConfiguredRole
from support.operator.services import owner

Object = dict[str, Any]
ROLES: list[tuple[ConfiguredRole, str]] = [
    ("prefill", "engine"),
    ("decode", "engine"),
    ("gateway", "gateway"),
]
GPU = {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}, "requests": {"cpu": "4"}}


def pod_spec(role: ConfiguredRole, **group: Any) -> Object:
    service = owner(**{role: group})
    if role == "gateway":
        spec: Object = gateway.deployment(service)["spec"]["template"]["spec"]
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
def test_fields_of_the_pod(role: ConfiguredRole, name: str, field: str, value: Any) -> None:
    assert pod_spec(role, template={"spec": {field: value}})[field] == value


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_resources_and_devices(role: ConfiguredRole, name: str) -> None:
    assert main_container(pod_spec(role, resources=GPU), name)["resources"] == GPU
    template = {
        "spec": {"containers": [{"name": name, "resources": {"limits": {"nvidia.com/gpu": 4}}}]}
    }
    assert main_container(pod_spec(role, template=template), name)["resources"] == {
        "limits": {"nvidia.com/gpu": 4}
    }
    both = main_container(pod_spec(role, resources=GPU, template=template), name)["resources"]
    assert both == {**GPU, "limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}}, (
        "the template has the last word"
    )


@pytest.mark.parametrize(("role", "name"), ROLES)
def test_volumes_are_added_to_those_the_operator_mounts(role: ConfiguredRole, name: str) -> None:
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
def test_variables_are_added_and_replaced_but_who_the_pod_is_stays(
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
    assert env["XDG_CACHE_HOME"] == secret, "a value and a reference at once would be refused"
    own = {item["name"]: item for item in main_container(pod_spec(role), name)["env"]}
    for variable in ("POD_IP", "POD_NAME", "POD_NAMESPACE"):
        assert env[variable] == own[variable]
    assert next(iter(env)) == "POD_IP", "others may refer to it"
    without = main_container(
        pod_spec(role, template={"spec": {"containers": [{"name": name, "env": None}]}}), name
    )
    assert {item["name"] for item in without["env"]} == {"POD_IP", "POD_NAME", "POD_NAMESPACE"}
