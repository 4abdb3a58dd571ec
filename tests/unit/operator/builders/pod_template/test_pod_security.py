"""All built pods comply with the restricted Pod Security profile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.builders import coordinator_deployment
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.names import MEMBER_ROLES
from support.operator.pod_security import violations
from support.operator.services import resolved

ROOT = Path(__file__).parents[4]
CLAIM = {"uri": "pvc://models/x"}
EXPERTS: Object = {"replicas": 2, "parallelism": {"expert": True, "tensor": 2}}

SPECS: dict[str, Object] = {
    "aggregated": {},
    "prefill and decode": {
        "prefill": {"replicas": 2},
        "decode": {"replicas": 3, "parallelism": {"tensor": 4}},
    },
    "experts": {"prefill": {"parallelism": {"tensor": 2}}, "decode": EXPERTS},
    "tuned": {
        "engine": {"device": "cuda", "numThreads": 4, "offloadMemory": "8Gi"},
        "kvTransfer": {"transport": "nixl"},
    },
    "with volumes that outlive the pods": {
        "engine": {"compileCache": {"claim": "a"}, "diagnostics": {"claim": "b"}}
    },
    "by ingress": {
        "gateway": {"replicas": 3, "ingress": {"host": "a.example"}, "maxConcurrentRequests": 7}
    },
    "with resources": {"decode": {"resources": {"limits": {"nvidia.com/gpu": 8}}}},
    "from a hub": {"model": {"uri": "hf://acme/x@main", "credentialsSecret": "hub"}, "prefill": {}},
    "from an object store, kept in a claim": {
        "model": {"uri": "s3://bucket/x", "cache": {"claim": "models"}}
    },
    "from an image": {"model": {"uri": "image://registry.example/models/x:1"}},
    "with keys and a certificate": {
        "gateway": {"apiKeys": {"secretName": "keys"}, "tls": {"secretName": "certificate"}}
    },
    "with overlays": {
        "decode": {
            "template": {
                "spec": {
                    "nodeSelector": {"gpu": "yes"},
                    "securityContext": {"supplementalGroups": [7]},
                }
            }
        },
        "gateway": {
            "template": {
                "spec": {"containers": [{"name": "gateway", "env": [{"name": "A", "value": "1"}]}]}
            }
        },
    },
}


def templates(service: ResolvedService) -> dict[str, Object]:
    """Return the pod templates by role, including the coordinator's."""
    found = {
        role: MemberTemplate(service, role).pod(0)
        for role in MEMBER_ROLES
        if role != "prefill" or service.has_prefill
    }
    deployments: dict[str, Callable[[ResolvedService], Object]] = {
        "gateway": gateway_deployment.build,
        "coordinator": coordinator_deployment.build,
    }
    return found | {role: build(service)["spec"]["template"] for role, build in deployments.items()}


@pytest.mark.parametrize("name", SPECS)
def test_every_pod_complies_with_the_restricted_profile(name: str) -> None:
    for role, pod in templates(
        resolved(coordinator="10.0.0.1", key_name="k", **{"model": CLAIM, **SPECS[name]})
    ).items():
        assert violations(pod["metadata"], pod["spec"]) == [], role
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"], role
        security = pod["spec"]["securityContext"]
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 65532, role


def test_a_host_path_model_is_the_only_violation() -> None:
    for role, pod in templates(
        resolved(coordinator="10.0.0.1", prefill={}, decode=EXPERTS)
    ).items():
        expected = [] if role == "coordinator" else ["volume model is a hostPath"]
        assert violations(pod["metadata"], pod["spec"]) == expected, role


def test_only_the_gateways_container_has_access_to_the_api() -> None:
    fetched = {"uri": "hf://org/name"}
    for role, pod in templates(
        resolved(coordinator="10.0.0.1", model=fetched, prefill={}, decode=EXPERTS)
    ).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, "every container gets the token"
        assert spec["serviceAccountName"] == f"demo-{'gateway' if role == 'gateway' else 'engine'}"
        tokens = {
            volume["name"]
            for volume in spec["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        holders = [
            container["name"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]
            if any(mount["name"] in tokens for mount in container["volumeMounts"])
        ]
        assert holders == (["gateway"] if role == "gateway" else []), role


def _set(path: str, value: Any) -> Callable[[Object], None]:
    """Return a change of a pod. `path` is separated by dots."""

    def change(pod: Object) -> None:
        node: Any = pod
        *way, last = path.split(".")
        for step in way:
            node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
        node[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.hostNetwork", True),
        ("spec.hostPID", True),
        ("spec.hostIPC", True),
        ("spec.volumes", [{"name": "v", "hostPath": {"path": "/"}}]),
        ("spec.volumes", [{"name": "v", "nfs": {"server": "s", "path": "/"}}]),
        ("spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
        ("spec.securityContext.runAsUser", 0),
        ("spec.securityContext.runAsNonRoot", False),
        ("spec.securityContext.seccompProfile", {"type": "Unconfined"}),
        ("spec.securityContext.seccompProfile", None),
        ("spec.securityContext.seLinuxOptions", {"type": "spc_t"}),
        ("spec.securityContext.appArmorProfile", {"type": "Unconfined"}),
        ("spec.securityContext.windowsOptions", {"hostProcess": True}),
        (
            "metadata.annotations",
            {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"},
        ),
        ("spec.containers.0.securityContext", None),
        ("spec.containers.0.securityContext.privileged", True),
        ("spec.containers.0.securityContext.allowPrivilegeEscalation", True),
        ("spec.containers.0.securityContext.capabilities", {"drop": ["NET_RAW"]}),
        (
            "spec.containers.0.securityContext.capabilities",
            {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
        ),
        ("spec.containers.0.securityContext.procMount", "Unmasked"),
        ("spec.containers.0.securityContext.runAsUser", 0),
        ("spec.containers.0.ports.0.hostPort", 80),
        ("spec.containers.0.livenessProbe.httpGet.host", "metadata.google.internal"),
        ("spec.initContainers", [{"name": "init"}]),
    ],
)
def test_the_checker_finds_every_violation(path: str, value: Any) -> None:
    pod = copy.deepcopy(MemberTemplate(resolved(model=CLAIM), "decode").pod(0))
    assert violations(pod["metadata"], pod["spec"]) == []
    _set(path, value)(pod)
    assert violations(pod["metadata"], pod["spec"])
