"""Built-in kinds are refused with the field errors of kube-apiserver."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pocketkube.apiserver.resources import BUILTIN, Object, Resource
from pocketkube.apiserver.schema.validation import validate

KINDS = {resource.kind: resource for resource in BUILTIN}
CONTAINER = {"name": "c", "image": "i"}
POD_SPEC: Object = {"containers": [CONTAINER]}
WORKLOAD: Object = {
    "replicas": 1,
    "selector": {"matchLabels": {"app": "x"}},
    "template": {"metadata": {"labels": {"app": "x"}}, "spec": POD_SPEC},
}
BACKEND = {"service": {"name": "s", "port": {"number": 80}}}
SPECS: dict[str, Object] = {
    "Pod": POD_SPEC,
    "Deployment": WORKLOAD,
    "ReplicaSet": WORKLOAD,
    "Service": {"type": "ClusterIP", "ports": [{"port": 80}]},
    "Ingress": {
        "rules": [{"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": BACKEND}]}}]
    },
    "PodDisruptionBudget": {"minAvailable": 1},
    "Lease": {"leaseDurationSeconds": 15},
}


def make(kind: str, spec: Object | None = None, **metadata: Any) -> Object:
    """Return a valid object. Entries of `spec` replace those of its spec."""
    merged = copy.deepcopy(SPECS.get(kind, {})) | (spec or {})
    return {"metadata": {"name": "x", **metadata}, "spec": merged}


def errors(kind: str | Resource, obj: Object, old: Object | None = None) -> dict[str, str]:
    """Return the messages of the errors by field."""
    resource = KINDS[kind] if isinstance(kind, str) else kind
    return {error.field: error.message for error in validate(resource, obj, old)}


@pytest.mark.parametrize("kind", SPECS)
def test_a_valid_object_has_no_errors_when_it_is_created_or_replaces_itself(kind: str) -> None:
    obj = make(kind, labels={"app.kubernetes.io/name": "a.b_c"}, finalizers=["a.dev/x"])
    assert errors(kind, obj) == {}
    assert errors(kind, obj, copy.deepcopy(obj)) == {}


@pytest.mark.parametrize(
    ("kind", "name", "accepted"),
    [
        ("ConfigMap", "a.b-1", True),
        ("ConfigMap", "a" * 253, True),
        ("ConfigMap", "a" * 254, False),
        ("ConfigMap", "A", False),
        ("ConfigMap", "a..b", False),
        ("Namespace", "a" * 63, True),
        ("Namespace", "a.b", False),
        ("Namespace", "a" * 64, False),
        ("Service", "a1", True),
        ("Service", "1a", False),
        ("Role", "system:A", True),
        ("Role", "a/b", False),
        ("Role", "..", False),
    ],
)
def test_the_kind_determines_which_names_are_valid(kind: str, name: str, accepted: bool) -> None:
    assert ("metadata.name" not in errors(kind, make(kind, name=name))) == accepted


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"labels": {"a/b/c": ""}}, "metadata.labels"),
        ({"labels": {"a": "x y"}}, "metadata.labels"),
        ({"labels": {"a": "x" * 64}}, "metadata.labels"),
        ({"finalizers": ["a.dev/x", "no spaces"]}, "metadata.finalizers[1]"),
        (
            {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p"}]},
            "metadata.ownerReferences[0].uid",
        ),
        (
            {
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Pod", "name": n, "uid": n, "controller": True}
                    for n in "ab"
                ]
            },
            "metadata.ownerReferences",
        ),
    ],
)
def test_an_error_of_the_metadata_names_its_field(metadata: Object, field: str) -> None:
    assert list(errors("ConfigMap", make("ConfigMap", **metadata))) == [field]


def container(**more: Any) -> Object:
    return {"containers": [CONTAINER | more]}


@pytest.mark.parametrize(
    ("kind", "spec", "field", "message"),
    [
        ("Pod", {"containers": []}, "spec.containers", "Required value"),
        ("Pod", container(name=""), "spec.containers[0].name", "Required value"),
        ("Pod", container(name="A"), "spec.containers[0].name", "RFC 1123 label"),
        ("Pod", container(image=""), "spec.containers[0].image", "Required value"),
        (
            "Pod",
            {"initContainers": [CONTAINER]},
            "spec.containers[0].name",
            'Duplicate value: "c"',
        ),
        (
            "Pod",
            container(ports=[{"containerPort": 65536}]),
            "spec.containers[0].ports[0].containerPort",
            "between 1 and 65535",
        ),
        ("Pod", container(env=[{"name": "1A"}]), "spec.containers[0].env[0].name", '"1A"'),
        ("Pod", container(env=[{}]), "spec.containers[0].env[0].name", "Required value"),
        (
            "Pod",
            container(volumeMounts=[{"name": "absent", "mountPath": "/a"}]),
            "spec.containers[0].volumeMounts[0].name",
            'Not found: "absent"',
        ),
        (
            "Pod",
            container(volumeMounts=[{"name": "v"}]) | {"volumes": [{"name": "v"}]},
            "spec.containers[0].volumeMounts[0].mountPath",
            "Required value",
        ),
        ("Pod", {"volumes": [{"name": "../../x"}]}, "spec.volumes[0].name", '"../../x"'),
        ("Pod", {"restartPolicy": "Sometimes"}, "spec.restartPolicy", '"Always", "OnFailure"'),
        (
            "Pod",
            {"terminationGracePeriodSeconds": -1},
            "spec.terminationGracePeriodSeconds",
            "greater than or equal to 0",
        ),
        ("Deployment", {"selector": None}, "spec.selector", "Required value"),
        ("Deployment", {"selector": {"matchLabels": {}}}, "spec.selector", "empty selector"),
        (
            "ReplicaSet",
            {"selector": {"matchLabels": {"app": "y"}}},
            "spec.template.metadata.labels",
            "`selector` does not match template `labels`",
        ),
        ("Deployment", {"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
        (
            "Deployment",
            {"template": WORKLOAD["template"] | {"spec": POD_SPEC | {"restartPolicy": "Never"}}},
            "spec.template.spec.restartPolicy",
            'supported values: "Always"',
        ),
        ("Service", {"type": "NodePort"}, "spec.type", 'supported values: "ClusterIP"'),
        ("Service", {"ports": []}, "spec.ports", "Required value"),
        ("Service", {"ports": [{"port": 0}]}, "spec.ports[0].port", "between 1 and 65535"),
        (
            "Service",
            {"ports": [{"port": 80, "name": "a"}, {"port": 81}]},
            "spec.ports[1].name",
            "Required value",
        ),
        (
            "Service",
            {"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "a"}]},
            "spec.ports[1].name",
            'Duplicate value: "a"',
        ),
        (
            "Service",
            {"ports": [{"port": 80, "nodePort": 30000}]},
            "spec.ports[0].nodePort",
            "Forbidden",
        ),
        ("Ingress", {"rules": []}, "spec", "`defaultBackend` or `rules`"),
        (
            "Ingress",
            {"rules": [{"http": {"paths": [{"backend": BACKEND}]}}]},
            "spec.rules[0].http.paths[0].pathType",
            "Required value",
        ),
        (
            "Ingress",
            {"rules": [{"http": {"paths": [{"pathType": "Exact"}]}}]},
            "spec.rules[0].http.paths[0].backend",
            "Required value",
        ),
        ("PodDisruptionBudget", {"maxUnavailable": 1}, "spec", "cannot be both set"),
        ("Lease", {"leaseDurationSeconds": 0}, "spec.leaseDurationSeconds", "greater than 0"),
    ],
)
def test_an_invalid_spec_is_refused_with_its_field_and_the_reason(
    kind: str, spec: Object, field: str, message: str
) -> None:
    found = errors(kind, make(kind, spec))
    assert list(found) == [field]
    assert message in found[field]


def test_a_headless_service_needs_no_ports() -> None:
    assert errors("Service", make("Service", {"clusterIP": "None", "ports": []})) == {}


@pytest.mark.parametrize(
    ("kind", "old", "new", "field"),
    [
        (
            "Deployment",
            make("Deployment", {"selector": {"matchLabels": {"b": "y"}}}),
            make("Deployment"),
            "spec.selector",
        ),
        (
            "Service",
            make("Service", {"clusterIP": "127.96.0.1"}),
            make("Service", {"clusterIP": "127.96.0.2"}),
            "spec.clusterIP",
        ),
        ("Secret", make("Secret") | {"type": "a"}, make("Secret") | {"type": "b"}, "type"),
        (
            "ConfigMap",
            make("ConfigMap") | {"immutable": True, "data": {"a": "1"}},
            make("ConfigMap") | {"immutable": True, "data": {"a": "2"}},
            "data",
        ),
        ("Pod", make("Pod"), make("Pod", {"restartPolicy": "Never"}), "spec"),
    ],
)
def test_an_update_cannot_change_an_immutable_field(
    kind: str, old: Object, new: Object, field: str
) -> None:
    assert list(errors(kind, new, old)) == [field]


def test_an_update_of_a_pod_can_change_its_images_and_its_deadline() -> None:
    changed = make("Pod", container(image="j") | {"activeDeadlineSeconds": 5})
    assert errors("Pod", changed, make("Pod")) == {}


def test_a_custom_kind_with_the_name_of_a_built_in_one_is_validated_by_its_metadata_only() -> None:
    custom = Resource("example.dev", "v1", "Service", "services", custom=True)
    assert errors(custom, make("Service", {"type": "LoadBalancer"})) == {}
    assert list(errors(custom, make("Service", name="A"))) == ["metadata.name"]
