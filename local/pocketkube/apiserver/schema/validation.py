"""Validate objects of built-in kinds, and the metadata of all objects.

Only checks that clients rely on are implemented. The messages are those of kube-apiserver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pocketkube.apiserver.errors import (
    FieldError,
    duplicate,
    forbidden_value,
    invalid_value,
    required,
    unsupported_value,
)
from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.schema.apiextensions import LABEL_1035, validate_crd

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")

_NOT_NEGATIVE = "must be greater than or equal to 0"
_PORT_TEXT = "must be between 1 and 65535, inclusive"
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character"
)
_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character"
)
_LABEL_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an "
    "alphabetic character, and end with an alphanumeric character"
)
#: Kind -> rule of its names: (pattern, description, maximum length).
_NAME_RULES = {
    "Service": (LABEL_1035, _LABEL_1035_TEXT, 63),
    "Namespace": (_LABEL, _LABEL_TEXT, 63),
}


def validate(resource: Resource, obj: Object, old: Object | None) -> list[FieldError]:
    """Validate `obj`, and return the errors.

    Args:
        old: the object before the write; None for a new object.
    """
    errors = list(_metadata(resource, obj["metadata"]))
    if resource.custom:
        return errors
    if resource.kind == "CustomResourceDefinition":
        errors += validate_crd(obj)
    elif check := _SPEC_CHECKS.get(resource.kind):
        errors += check(obj.get("spec") or {})
    if old is not None and not errors:
        errors += _immutable(resource.kind, obj, old)
    return errors


def _metadata(resource: Resource, metadata: Object) -> Iterator[FieldError]:
    """Yield the errors in the name, the labels, the finalizers and the owner references."""
    yield from _name(resource, metadata.get("name", ""))
    for key, value in (metadata.get("labels") or {}).items():
        if not _QUALIFIED.fullmatch(key):
            yield invalid_value(
                "metadata.labels",
                key,
                "name part must consist of alphanumeric characters, '-', '_' or '.'",
            )
        if not _LABEL_VALUE.fullmatch(value):
            yield invalid_value(
                "metadata.labels",
                value,
                "a valid label must be an empty string or consist of alphanumeric "
                "characters, '-', '_' or '.', at most 63",
            )
    for index, finalizer in enumerate(metadata.get("finalizers") or ()):
        if not _QUALIFIED.fullmatch(finalizer):
            yield invalid_value(
                f"metadata.finalizers[{index}]",
                finalizer,
                "name is neither a standard finalizer name nor is it fully qualified",
            )
    owners = metadata.get("ownerReferences") or ()
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        yield invalid_value(
            "metadata.ownerReferences", "", "Only one reference can have Controller set to true"
        )
    yield from (
        invalid_value(
            f"metadata.ownerReferences[{index}].{field}", "", f"{field} must not be empty"
        )
        for index, owner in enumerate(owners)
        for field in ("apiVersion", "kind", "name", "uid")
        if not owner.get(field)
    )


def _name(resource: Resource, name: str) -> Iterator[FieldError]:
    pattern, text, limit = _NAME_RULES.get(resource.kind, (_SUBDOMAIN, _SUBDOMAIN_TEXT, 253))
    if resource.group == "rbac.authorization.k8s.io":
        if "/" in name or "%" in name or name in (".", ".."):
            yield invalid_value("metadata.name", name, "may not contain '/' or '%'")
    elif not pattern.fullmatch(name):
        yield invalid_value("metadata.name", name, text)
    if len(name) > limit:
        yield invalid_value("metadata.name", name, f"must be no more than {limit} characters")


def _pod_spec(spec: Object, path: str = "spec") -> Iterator[FieldError]:
    if not spec.get("containers"):
        yield required(f"{path}.containers")
    names: set[str] = set()
    volumes: set[str] = set()
    for index, volume in enumerate(spec.get("volumes") or ()):
        yield from _unique_label(volume.get("name", ""), f"{path}.volumes[{index}].name", volumes)
    for group in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(group) or ()):
            yield from _container(container, f"{path}.{group}[{index}]", names, volumes)
    policies = ("Always", "OnFailure", "Never")
    if spec.get("restartPolicy", "Always") not in policies:
        yield unsupported_value(f"{path}.restartPolicy", spec["restartPolicy"], policies)
    if (grace_s := spec.get("terminationGracePeriodSeconds", 0)) < 0:
        yield invalid_value(f"{path}.terminationGracePeriodSeconds", grace_s, _NOT_NEGATIVE)


def _unique_label(name: str, path: str, seen: set[str]) -> Iterator[FieldError]:
    """Yield an error if `name` is not a DNS label, or is in `seen`. Else add it to `seen`."""
    if not name:
        yield required(path)
    elif not _LABEL.fullmatch(name) or len(name) > 63:
        yield invalid_value(path, name, _LABEL_TEXT)
    elif name in seen:
        yield duplicate(path, name)
    else:
        seen.add(name)


def _container(
    container: Object, path: str, names: set[str], volumes: set[str]
) -> Iterator[FieldError]:
    """Yield the errors in a container of a pod spec.

    Args:
        names: the names of the pod's containers that are already validated. The name of this
            container is added if it is valid.
        volumes: the names of the pod's volumes.
    """
    yield from _unique_label(container.get("name", ""), f"{path}.name", names)
    if not container.get("image"):
        yield required(f"{path}.image")
    for index, port in enumerate(container.get("ports") or ()):
        if not 0 < (number := port.get("containerPort", 0)) < 65536:
            yield invalid_value(f"{path}.ports[{index}].containerPort", number, _PORT_TEXT)
    for index, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            yield required(f"{path}.env[{index}].name")
        elif not _ENV_NAME.fullmatch(variable["name"]):
            yield invalid_value(
                f"{path}.env[{index}].name",
                variable["name"],
                "a valid environment variable name must consist of alphabetic characters, "
                "digits, '_', '-', or '.'",
            )
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if not mount.get("mountPath"):
            yield required(f"{path}.volumeMounts[{index}].mountPath")
        if mount.get("name") not in volumes:
            yield FieldError(
                f"{path}.volumeMounts[{index}].name",
                "FieldValueNotFound",
                f'Not found: "{mount.get("name", "")}"',
            )


def _workload(spec: Object) -> Iterator[FieldError]:
    selector, template = spec.get("selector"), spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if not selector:
        yield required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield invalid_value("spec.selector", selector, "empty selector is invalid for deployment")
    elif (selector.get("matchLabels") or {}).items() - labels.items():
        yield invalid_value(
            "spec.template.metadata.labels",
            ",".join(f"{key}={value}" for key, value in labels.items()),
            "`selector` does not match template `labels`",
        )
    if spec.get("replicas", 0) < 0:
        yield invalid_value("spec.replicas", spec["replicas"], _NOT_NEGATIVE)
    pod = template.get("spec") or {}
    yield from _pod_spec(pod, "spec.template.spec")
    if (policy := pod.get("restartPolicy", "Always")) != "Always":
        yield unsupported_value("spec.template.spec.restartPolicy", policy, ("Always",))


def _service(spec: Object) -> Iterator[FieldError]:
    if spec.get("type") != "ClusterIP":
        yield unsupported_value("spec.type", spec.get("type"), ("ClusterIP",))
    ports = spec.get("ports") or ()
    if not ports and spec.get("clusterIP") != "None":
        yield required("spec.ports")
    names: set[str] = set()
    for index, port in enumerate(ports):
        path = f"spec.ports[{index}]"
        if not 0 < (number := port.get("port", 0)) < 65536:
            yield invalid_value(f"{path}.port", number, _PORT_TEXT)
        name = port.get("name", "")
        if len(ports) > 1 and not name:
            yield required(f"{path}.name")
        elif name and name in names:
            yield duplicate(f"{path}.name", name)
        names.add(name)
        if port.get("nodePort"):
            yield forbidden_value(f"{path}.nodePort", "this control plane serves no node ports")


def _ingress(spec: Object) -> Iterator[FieldError]:
    if not spec.get("rules") and not spec.get("defaultBackend"):
        yield invalid_value("spec", spec, "either `defaultBackend` or `rules` must be specified")
    for i, rule in enumerate(spec.get("rules") or ()):
        for j, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            field = f"spec.rules[{i}].http.paths[{j}]"
            kinds = ("Exact", "ImplementationSpecific", "Prefix")
            if "pathType" not in path:
                yield required(f"{field}.pathType", "pathType must be specified")
            elif path["pathType"] not in kinds:
                yield unsupported_value(f"{field}.pathType", path["pathType"], kinds)
            backend = path.get("backend") or {}
            if not backend.get("service") and not backend.get("resource"):
                yield required(f"{field}.backend")


def _budget(spec: Object) -> Iterator[FieldError]:
    if "minAvailable" in spec and "maxUnavailable" in spec:
        yield invalid_value("spec", spec, "minAvailable and maxUnavailable cannot be both set")


def _lease(spec: Object) -> Iterator[FieldError]:
    if (duration_s := spec.get("leaseDurationSeconds", 1)) <= 0:
        yield invalid_value("spec.leaseDurationSeconds", duration_s, "must be greater than 0")


_SPEC_CHECKS: dict[str, Callable[[Object], Iterator[FieldError]]] = {
    "Pod": _pod_spec,
    "Deployment": _workload,
    "ReplicaSet": _workload,
    "Service": _service,
    "Ingress": _ingress,
    "PodDisruptionBudget": _budget,
    "Lease": _lease,
}


def _immutable(kind: str, obj: Object, old: Object) -> Iterator[FieldError]:
    """Yield an error if an update changes an immutable field of a built-in kind."""
    spec, old_spec = obj.get("spec") or {}, old.get("spec") or {}
    match kind:
        case "Deployment" | "ReplicaSet" if spec.get("selector") != old_spec.get("selector"):
            yield invalid_value("spec.selector", spec.get("selector"), "field is immutable")
        case "Service" if (
            old_spec.get("clusterIP") and spec.get("clusterIP") != old_spec["clusterIP"]
        ):
            yield invalid_value("spec.clusterIP", spec.get("clusterIP", ""), "field is immutable")
        case "Secret" if obj.get("type") != old.get("type"):
            yield invalid_value("type", obj.get("type"), "field is immutable")
        case "Secret" | "ConfigMap" if old.get("immutable") and any(
            obj.get(field) != old.get(field) for field in ("data", "binaryData", "immutable")
        ):
            yield forbidden_value("data", "field is immutable when `immutable` is set")
        case "Pod" if _fixed_pod_spec(spec) != _fixed_pod_spec(old_spec):
            yield forbidden_value(
                "spec",
                "pod updates may not change fields other than "
                "`spec.containers[*].image`,`spec.initContainers[*].image`,"
                "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
                "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 "
                "if it was previously negative)",
            )
        case "CustomResourceDefinition":
            for field in ("group", "scope"):
                if spec.get(field) != old_spec.get(field):
                    yield invalid_value(f"spec.{field}", spec.get(field), "field is immutable")


def _fixed_pod_spec(spec: Object) -> Object:
    fixed = {
        key: value
        for key, value in spec.items()
        if key not in ("activeDeadlineSeconds", "tolerations")
    }
    for group in ("containers", "initContainers"):
        fixed[group] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(group) or ()]
    return fixed
