"""The chart rendered by Helm's engine: its defaults equal manifests/, and each value's effect."""

from __future__ import annotations

import tomllib
from typing import Any

import helm_python as helm
import pytest
import yaml

from baton_operator import names
from baton_operator.builders.restrictions import Restrictions
from baton_operator.cli import HTTP_PORT, _parser, restrictions_of
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_METRICS_PORT
from baton_protocol.topology import COORDINATOR_HTTP_PORT
from support.install.rendered_chart import (
    CHART,
    NAMESPACE,
    ROOT,
    Object,
    kinds,
    notes,
    one,
    pod_spec,
    render,
)
from support.operator.pod_security import violations

ALL_OPTIONS: Object = {
    name: {"enabled": True}
    for name in (
        "podDisruptionBudget",
        "serviceMonitor",
        "podMonitor",
        "dashboard",
        "networkPolicy",
    )
}
EDITOR = "baton-llmservice-editor"
SELECTOR = {
    "app.kubernetes.io/name": "baton",
    "app.kubernetes.io/instance": "baton",
    "app.kubernetes.io/component": "operator",
}


def manifest(path: str) -> Object:
    document: Object = list(yaml.safe_load_all((ROOT / "manifests" / path).read_text()))[-1]
    return document


def named(objects: list[Object], kind: str, name: str) -> list[Object]:
    """Return the objects of this kind and name, which differ in their namespace."""
    return [obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name)]


def container(values: Object | None = None) -> Object:
    (found,) = pod_spec(values)["containers"]
    return found


def test_lint_reports_only_the_missing_icon() -> None:
    for values in (None, ALL_OPTIONS, {"watchNamespaces": ["a"]}):
        report = helm.lint(CHART, values, strict=True)
        assert report["errors"] == []
        assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_the_chart_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (version, version)


def test_by_default_the_chart_renders_the_plain_manifests() -> None:
    objects = render()
    assert kinds(objects) == [
        "ClusterRole",
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "Deployment",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "ServiceAccount",
    ]
    crd, plain = one(objects, "CustomResourceDefinition"), manifest("crd/llmservices.yaml")
    assert crd["spec"] == plain["spec"]
    assert crd["metadata"]["name"] == plain["metadata"]["name"]
    for name, path in (
        ("baton-operator", "rbac/cluster_role.yaml"),
        (EDITOR, "rbac/llmservice_editor.yaml"),
    ):
        (rendered,) = named(objects, "ClusterRole", name)
        assert rendered["metadata"]["name"] == manifest(path)["metadata"]["name"]
        assert rendered["rules"] == manifest(path)["rules"]
    binding, plain = one(objects, "ClusterRoleBinding"), manifest("rbac/cluster_role_binding.yaml")
    assert (binding["roleRef"], binding["subjects"]) == (plain["roleRef"], plain["subjects"])
    lease_role, lease_binding = yaml.safe_load_all(
        (ROOT / "manifests/rbac/service_account_lease.yaml").read_text()
    )
    for rendered, plain in (
        (one(objects, "Role"), lease_role),
        (one(objects, "RoleBinding"), lease_binding),
    ):
        for part in ("name", "namespace"):
            assert rendered["metadata"][part] == plain["metadata"][part]
        for part in ("rules", "roleRef", "subjects"):
            assert rendered.get(part) == plain.get(part)
    account, plain = one(objects, "ServiceAccount"), manifest("rbac/service_account.yaml")
    assert account["metadata"]["name"] == plain["metadata"]["name"]
    assert account["metadata"]["namespace"] == plain["metadata"]["namespace"]


def selected_labels(deployment: Object) -> Object:
    labels: Object = deployment["spec"]["selector"]["matchLabels"]
    return labels


def test_the_deployment_equals_that_of_the_plain_manifests() -> None:
    rendered, plain = one(render(), "Deployment"), manifest("operator.yaml")
    assert rendered["metadata"]["name"] == plain["metadata"]["name"]
    assert rendered["spec"]["replicas"] == plain["spec"]["replicas"] == 2
    surge = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert rendered["spec"]["strategy"] == plain["spec"]["strategy"] == surge
    spec, plain_spec = (deployment["spec"]["template"]["spec"] for deployment in (rendered, plain))
    (ours,), (theirs,) = spec.pop("containers"), plain_spec.pop("containers")
    arguments = [
        "--log-level=info",
        "--log-format=json",
        "--resync=300",
        "--lease-name=baton-operator",
    ]
    assert ours.pop("args") == arguments
    assert set(theirs.pop("args")) <= set(arguments)
    assert ours.pop("imagePullPolicy") == "IfNotPresent"
    assert ours == theirs
    for spreads, labels in ((spec, SELECTOR), (plain_spec, selected_labels(plain))):
        (preferred,) = spreads.pop("affinity")["podAntiAffinity"].values()
        assert preferred[0]["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
    assert spec == plain_spec


@pytest.mark.parametrize(
    "values", [{}, ALL_OPTIONS, {**ALL_OPTIONS, "watchNamespaces": ["a", "b"]}]
)
def test_every_object_has_the_labels_and_its_namespace(values: Object) -> None:
    for obj in render(values):
        assert SELECTOR.items() <= obj["metadata"]["labels"].items(), obj["kind"]
        assert obj["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert obj["metadata"]["labels"]["helm.sh/chart"].startswith("baton-")
        scoped = {"CustomResourceDefinition": None, "ClusterRole": None, "ClusterRoleBinding": None}
        if obj["kind"] not in ("Role", "RoleBinding"):
            assert obj["metadata"].get("namespace") == scoped.get(obj["kind"], NAMESPACE), obj[
                "kind"
            ]


def test_no_two_objects_have_the_same_name() -> None:
    objects = render({**ALL_OPTIONS, "watchNamespaces": ["a", "b"]})
    identities = [
        (obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in objects
    ]
    assert len(set(identities)) == len(identities)


def test_the_pod_has_a_restricted_security_context() -> None:
    spec = pod_spec()
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [list(volume) for volume in spec["volumes"]] == [["name", "emptyDir"]]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(
        pod_spec({"runAsUser": None})["securityContext"]
    )


@pytest.mark.parametrize(
    "values", [{}, ALL_OPTIONS, {"runAsUser": None}, {"watchNamespaces": ["a"]}]
)
def test_the_restricted_profile_admits_the_pod_with_any_values(values: Object) -> None:
    template = one(render(values), "Deployment")["spec"]["template"]
    assert violations(template["metadata"], template["spec"]) == []


def test_the_selector_finds_the_operator_and_not_the_pods_of_services() -> None:
    deployment = one(
        render({"podLabels": {"team": "ml", "app.kubernetes.io/component": "gateway"}}),
        "Deployment",
    )
    assert deployment["spec"]["selector"]["matchLabels"] == SELECTOR
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert SELECTOR.items() <= labels.items(), "podLabels must not take the selector's labels away"
    assert labels["team"] == "ml"
    for role in ("prefill", "decode", "gateway", "coordinator"):
        assert not SELECTOR.items() <= names.labels("baton", role).items()


TERM = {"key": "pool", "operator": "Exists"}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
AFFINITY = {
    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
}


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"imagePullSecrets": [{"name": "registry"}]}, "imagePullSecrets", [{"name": "registry"}]),
        ({"nodeSelector": {"pool": "system"}}, "nodeSelector", {"pool": "system"}),
        ({"tolerations": [TERM]}, "tolerations", [TERM]),
        ({"affinity": AFFINITY}, "affinity", AFFINITY),
        ({"topologySpreadConstraints": [SPREAD]}, "topologySpreadConstraints", [SPREAD]),
        (
            {"priorityClassName": "system-cluster-critical"},
            "priorityClassName",
            "system-cluster-critical",
        ),
        ({"serviceAccount": {"create": False, "name": "mine"}}, "serviceAccountName", "mine"),
    ],
)
def test_values_set_fields_of_the_pod(values: Object, field: str, expected: Any) -> None:
    assert pod_spec(values)[field] == expected
    assert field in ("serviceAccountName", "affinity") or field not in pod_spec()


def test_values_set_annotations_of_the_pod() -> None:
    template = one(render({"podAnnotations": {"a": "b"}}), "Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "baton-operator:0.1.0"),
        ({"repository": "registry.example/x", "tag": "v2"}, "registry.example/x:v2"),
        ({"tag": "v2", "digest": "sha256:" + "a" * 64}, "baton-operator@sha256:" + "a" * 64),
    ],
)
def test_values_set_the_image(values: Object, expected: str) -> None:
    assert container({"image": values})["image"] == expected


def test_values_set_options_of_the_container() -> None:
    values = {
        "logLevel": "debug",
        "logFormat": "text",
        "resyncSeconds": 120,
        "image": {"pullPolicy": "Always"},
    }
    assert container(values)["args"][:3] == [
        "--log-level=debug",
        "--log-format=text",
        "--resync=120",
    ]
    assert container(values)["imagePullPolicy"] == "Always"
    limits = {"limits": {"memory": "1Gi", "cpu": "2"}}
    assert container({"resources": limits})["resources"] == {**container()["resources"], **limits}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Restrictions()),
        ({"watchNamespaces": ["a"]}, None),
        ({"watchNamespaces": ["a"], "templates": "restricted"}, Restrictions()),
        ({"templates": "unrestricted"}, None),
        (
            {"hostPaths": ["/mnt/models/", "/mnt/cache"], "annotationPrefixes": ["x.io/a"]},
            Restrictions(
                host_paths=("/mnt/models/", "/mnt/cache"), annotation_prefixes=("x.io/a",)
            ),
        ),
    ],
)
def test_values_set_what_services_may_request(
    values: Object, expected: Restrictions | None
) -> None:
    """The defaults differ, because an operator of all namespaces has several tenants."""
    assert restrictions_of(_parser().parse_args(container(values)["args"])) == expected


def test_the_plain_manifests_restrict_services() -> None:
    (plain,) = manifest("operator.yaml")["spec"]["template"]["spec"]["containers"]
    assert restrictions_of(_parser().parse_args(plain["args"])) == Restrictions()


@pytest.mark.parametrize(
    ("release", "values", "expected"),
    [
        ("baton", {}, "baton-operator"),
        ("prod", {}, "prod-baton-operator"),
        ("baton-" + "x" * 47, {}, "baton-" + "x" * 47 + "-operator"),
        ("prod", {"fullnameOverride": "llm"}, "llm"),
    ],
)
def test_object_names_follow_the_release(release: str, values: Object, expected: str) -> None:
    objects = [
        obj
        for obj in render(values, release=release)
        if obj["kind"] != "CustomResourceDefinition" and obj["metadata"]["name"] != EDITOR
    ]
    assert {obj["metadata"]["name"] for obj in objects} == {expected, f"{expected}-lease"}
    lease = next(obj for obj in objects if obj["kind"] == "Role")
    assert lease["rules"][1]["resourceNames"] == [expected]
    assert (
        f"--lease-name={expected}"
        in one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    assert len(expected) <= 63


def test_with_watch_namespaces_the_operator_has_no_rights_elsewhere() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    assert not {"ClusterRole", "ClusterRoleBinding"} & set(kinds(objects))
    beyond = [
        obj
        for obj in objects
        if obj["kind"] == "Role" and obj["metadata"]["namespace"] == NAMESPACE
    ]
    assert [rule["resources"] for role in beyond for rule in role["rules"]] == [
        ["leases"],
        ["leases"],
    ]
    deployment = one(objects, "Deployment")
    roles = named(objects, "Role", "baton-operator")
    bindings = named(objects, "RoleBinding", "baton-operator")
    for found in (roles, bindings):
        assert [obj["metadata"]["namespace"] for obj in found] == ["team-a", "team-b"]
    for role, binding in zip(roles, bindings, strict=True):
        assert role["rules"] == manifest("rbac/cluster_role.yaml")["rules"]
        assert binding["roleRef"]["kind"] == "Role"
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "baton-operator", "namespace": NAMESPACE},
        ]
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--namespace=team-a", "--namespace=team-b"]


def test_objects_that_the_user_provides_are_not_rendered() -> None:
    values = {
        "crds": {"install": False},
        "rbac": {"create": False},
        "editorRole": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
    }
    assert kinds(render(values)) == ["Deployment", "NetworkPolicy"]
    binding = one(
        render({"serviceAccount": {"create": False, "name": "mine"}}), "ClusterRoleBinding"
    )
    assert binding["subjects"][0]["name"] == "mine"


def test_the_crd_is_kept_unless_crds_keep_is_false() -> None:
    policy = "helm.sh/resource-policy"
    crd = one(render(), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {policy: "keep"}
    assert (
        "annotations"
        not in one(render({"crds": {"keep": False}}), "CustomResourceDefinition")["metadata"]
    )


def test_values_set_annotations_of_the_service_account() -> None:
    account = one(render({"serviceAccount": {"annotations": {"role": "x"}}}), "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "x"}


def test_values_set_the_disruption_budget() -> None:
    budget = one(
        render({"podDisruptionBudget": {"enabled": True, "maxUnavailable": 2}}),
        "PodDisruptionBudget",
    )
    assert budget["apiVersion"] == "policy/v1"
    assert budget["spec"] == {"maxUnavailable": 2, "selector": {"matchLabels": SELECTOR}}


def test_the_service_monitor_finds_the_operators_metrics() -> None:
    values = {
        "serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "prometheus"}}
    }
    objects = render(values)
    service, monitor = one(objects, "Service"), one(objects, "ServiceMonitor")
    assert service["spec"]["selector"] == SELECTOR
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert endpoint == {"port": port["name"], "path": "/metrics", "interval": "5s"}
    assert port["targetPort"] in [entry["name"] for entry in container()["ports"]]


def test_the_pod_monitor_finds_the_pods_of_services() -> None:
    monitor = one(render({"podMonitor": {"enabled": True, "labels": {"a": "b"}}}), "PodMonitor")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= names.labels("demo", "decode").items()
    )
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    assert monitor["metadata"]["labels"]["a"] == "b"
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in endpoints] == ["http", "metrics"]
    drops = {"regex": "gateway", "action": "drop"}.items()
    assert [drops <= each["relabelings"][0].items() for each in endpoints] == [True, False]
    values = {"podMonitor": {"enabled": True}, "watchNamespaces": ["a"]}
    assert one(render(values), "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["a"]}


def test_the_network_policy_allows_the_egress_that_the_operator_needs() -> None:
    plain = one(render(), "NetworkPolicy")["spec"]
    assert plain["podSelector"]["matchLabels"] == SELECTOR
    assert plain["policyTypes"] == ["Ingress", "Egress"]
    (metrics,), (dns, api, members) = plain["ingress"], plain["egress"]
    assert metrics == {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert [port["port"] for port in api["ports"]] == [443, 6443, 8443, 16443]
    assert "to" not in api
    assert [port["port"] for port in members["ports"]] == [
        ENGINE_HTTP_PORT,
        COORDINATOR_HTTP_PORT,
        GATEWAY_METRICS_PORT,
    ]
    (peer,) = members["to"]
    assert peer["podSelector"]["matchLabels"].items() <= names.labels("demo", "coordinator").items()

    assert "NetworkPolicy" not in kinds(render({"networkPolicy": {"enabled": False}}))
    source = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    values = {
        "metricsFrom": [source],
        "apiServerPorts": [8443],
        "apiServerCIDRs": ["10.0.0.1/32"],
    }
    narrow = one(render({"networkPolicy": values}), "NetworkPolicy")["spec"]
    assert narrow["ingress"][0]["from"] == [source]
    assert narrow["egress"][1] == {
        "ports": [{"port": 8443, "protocol": "TCP"}],
        "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
    }


def test_the_role_of_tenants_is_not_granted_by_default() -> None:
    objects = render()
    (role,) = named(objects, "ClusterRole", EDITOR)
    assert not [label for label in role["metadata"]["labels"] if "aggregate" in label]
    bound = [obj["roleRef"]["name"] for obj in objects if "roleRef" in obj]
    assert EDITOR not in bound
    (role,) = named(render({"editorRole": {"aggregateToEdit": True}}), "ClusterRole", EDITOR)
    labels = role["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if "aggregate" in name} == {
        "rbac.authorization.k8s.io/aggregate-to-edit": "true",
        "rbac.authorization.k8s.io/aggregate-to-admin": "true",
    }
    assert not named(render({"editorRole": {"create": False}}), "ClusterRole", EDITOR)


def test_the_role_of_tenants_grants_llmservices_only() -> None:
    (role,) = named(render(), "ClusterRole", EDITOR)
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {names.GROUP}
    verbs = {rule["resources"][0]: rule["verbs"] for rule in role["rules"]}
    assert {"create", "update", "patch", "delete"} <= set(verbs["llmservices"])
    assert verbs["llmservices/status"] == ["get"], "the operator trusts the status"


def test_with_watch_namespaces_tenants_have_a_role_in_each_namespace() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    roles = named(objects, "Role", EDITOR)
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    for role in roles:
        assert role["rules"] == manifest("rbac/llmservice_editor.yaml")["rules"]


def test_the_network_policy_equals_that_of_the_plain_manifests() -> None:
    policy, deployment = yaml.safe_load_all((ROOT / "manifests/operator.yaml").read_text())
    rendered = one(render(), "NetworkPolicy")
    for part in ("name", "namespace"):
        assert policy["metadata"][part] == rendered["metadata"][part]
    assert policy["spec"].pop("podSelector") == deployment["spec"]["selector"]
    del rendered["spec"]["podSelector"]
    assert policy["spec"] == rendered["spec"]


def test_the_notes_name_the_next_steps() -> None:
    text = notes()
    assert "at the ports 443, 6443, 8443, 16443" in text
    assert "rollout status deployment/baton-operator" in text
    assert "all namespaces" in text
    assert "names no registry" in text
    assert "image: REGISTRY/baton:0.1.0" in text
    text = notes(
        {
            "watchNamespaces": ["team-a"],
            "image": {"repository": "r.example/x"},
            "crds": {"install": False},
        }
    )
    assert "image: r.example/baton:0.1.0" in text
    assert "kubectl -n team-a apply" in text
    assert "names no registry" not in text
    assert "not part of this release" in text
