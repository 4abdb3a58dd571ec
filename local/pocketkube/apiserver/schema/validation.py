"""Validate objects of built-in kinds, and the metadata of all objects.

Only checks that clients rely on are implemented. The messages are those of kube-apiserver.
"""

from __future__ import annotations

import re

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


def validate(resource: Resource, obj: Object, old: Object | None) -> list[FieldError]:
    """Validate `obj`, which would replace `old` (None for a new object). Return the errors."""
    errors = validate_metadata(resource, obj["metadata"])
    if resource.custom:
        return errors
    if check := _CHECKS.get(resource.kind):
        errors += check(obj)
    if old is not None and not errors:
        errors += _immutable(resource.kind, obj, old)
    return errors


def validate_metadata(resource: Resource, metadata: Object) -> list[FieldError]:
    """Validate the name, labels, finalizers and owner references. Return the errors."""
    errors = _name(resource, metadata.get("name", ""))
    for key, value in (metadata.get("labels") or {}).items():
        if not _QUALIFIED.fullmatch(key):
            errors.append(
                invalid_value(
                    "metadata.labels",
                    key,
                    "name part must consist of alphanumeric characters, '-', '_' or '.'",
                )
            )
        if not _LABEL_VALUE.fullmatch(value):
            errors.append(
                invalid_value(
                    "metadata.labels",
                    value,
                    "a valid label must be an empty string or consist of alphanumeric "
                    "characters, '-', '_' or '.', at most 63",
                )
            )
    errors += [
        invalid_value(
            f"metadata.finalizers[{index}]",
            finalizer,
            "name is neither a standard finalizer name nor is it fully qualified",
        )
        for index, finalizer in enumerate(metadata.get("finalizers") or ())
        if not _QUALIFIED.fullmatch(finalizer)
    ]
    owners = metadata.get("ownerReferences") or ()
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        errors.append(
            invalid_value(
                "metadata.ownerReferences", "", "Only one reference can have Controller set to true"
            )
        )
    errors += [
        invalid_value(
            f"metadata.ownerReferences[{index}].{field}", "", f"{field} must not be empty"
        )
        for index, owner in enumerate(owners)
        for field in ("apiVersion", "kind", "name", "uid")
        if not owner.get(field)
    ]
    return errors


def _name(resource: Resource, name: str) -> list[FieldError]:
    errors: list[FieldError] = []
    if resource.kind == "Service":
        pattern, text, limit = LABEL_1035, _LABEL_1035_TEXT, 63
    elif resource.kind == "Namespace":
        pattern, text, limit = _LABEL, _LABEL_TEXT, 63
    else:
        pattern, text, limit = _SUBDOMAIN, _SUBDOMAIN_TEXT, 253
    if resource.group == "rbac.authorization.k8s.io":
        if "/" in name or "%" in name or name in (".", ".."):
            errors.append(invalid_value("metadata.name", name, "may not contain '/' or '%'"))
    elif not pattern.fullmatch(name):
        errors.append(invalid_value("metadata.name", name, text))
    if len(name) > limit:
        errors.append(
            invalid_value("metadata.name", name, f"must be no more than {limit} characters")
        )
    return errors


def _pod_spec(spec: Object, path: str) -> list[FieldError]:
    errors: list[FieldError] = []
    if not spec.get("containers"):
        errors.append(required(f"{path}.containers"))
    names: set[str] = set()
    for group in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(group) or ()):
            errors += _container(container, f"{path}.{group}[{index}]", names)
    volumes: set[str] = set()
    for index, volume in enumerate(spec.get("volumes") or ()):
        errors += _unique_label(volume.get("name", ""), f"{path}.volumes[{index}].name", volumes)
    for group in ("initContainers", "containers"):
        errors += [
            FieldError(
                f"{path}.{group}[{i}].volumeMounts[{j}].name",
                "FieldValueNotFound",
                f'Not found: "{mount.get("name", "")}"',
            )
            for i, container in enumerate(spec.get(group) or ())
            for j, mount in enumerate(container.get("volumeMounts") or ())
            if mount.get("name") not in volumes
        ]
    policies = ("Always", "OnFailure", "Never")
    if spec.get("restartPolicy", "Always") not in policies:
        errors.append(unsupported_value(f"{path}.restartPolicy", spec["restartPolicy"], policies))
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        errors.append(
            invalid_value(
                f"{path}.terminationGracePeriodSeconds",
                spec["terminationGracePeriodSeconds"],
                "must be greater than or equal to 0",
            )
        )
    return errors


def _unique_label(name: str, path: str, seen: set[str]) -> list[FieldError]:
    """Check that `name` is a DNS label and not in `seen`. Return the errors.

    A valid name is added to `seen`.
    """
    if not name:
        return [required(path)]
    if not _LABEL.fullmatch(name) or len(name) > 63:
        return [invalid_value(path, name, _LABEL_TEXT)]
    if name in seen:
        return [duplicate(path, name)]
    seen.add(name)
    return []


def _container(container: Object, path: str, names: set[str]) -> list[FieldError]:
    errors = _unique_label(container.get("name", ""), f"{path}.name", names)
    if not container.get("image"):
        errors.append(required(f"{path}.image"))
    errors += [
        invalid_value(f"{path}.ports[{index}].containerPort", number, _PORT_TEXT)
        for index, port in enumerate(container.get("ports") or ())
        if not 0 < (number := port.get("containerPort", 0)) < 65536
    ]
    for index, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            errors.append(required(f"{path}.env[{index}].name"))
        elif not _ENV_NAME.fullmatch(variable["name"]):
            errors.append(
                invalid_value(
                    f"{path}.env[{index}].name",
                    variable["name"],
                    "a valid environment variable name must consist of alphabetic characters, "
                    "digits, '_', '-', or '.'",
                )
            )
    errors += [
        required(f"{path}.volumeMounts[{index}].mountPath")
        for index, mount in enumerate(container.get("volumeMounts") or ())
        if not mount.get("mountPath")
    ]
    return errors


def _pod(obj: Object) -> list[FieldError]:
    return _pod_spec(obj.get("spec") or {}, "spec")


def _workload(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors: list[FieldError] = []
    selector = spec.get("selector")
    template = spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if not selector:
        errors.append(required("spec.selector"))
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        errors.append(
            invalid_value("spec.selector", selector, "empty selector is invalid for deployment")
        )
    elif any(
        labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()
    ):
        shown = ",".join(f"{key}={value}" for key, value in labels.items())
        errors.append(
            invalid_value(
                "spec.template.metadata.labels",
                shown,
                "`selector` does not match template `labels`",
            )
        )
    if spec.get("replicas", 0) < 0:
        errors.append(
            invalid_value("spec.replicas", spec["replicas"], "must be greater than or equal to 0")
        )
    errors += _pod_spec(template.get("spec") or {}, "spec.template.spec")
    if (policy := (template.get("spec") or {}).get("restartPolicy", "Always")) != "Always":
        errors.append(unsupported_value("spec.template.spec.restartPolicy", policy, ("Always",)))
    return errors


def _service(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors: list[FieldError] = []
    if spec.get("type") != "ClusterIP":
        errors.append(unsupported_value("spec.type", spec.get("type"), ("ClusterIP",)))
    ports = spec.get("ports") or ()
    if not ports and spec.get("clusterIP") != "None":
        errors.append(required("spec.ports"))
    names: set[str] = set()
    for index, port in enumerate(ports):
        path = f"spec.ports[{index}]"
        if not 0 < port.get("port", 0) < 65536:
            errors.append(invalid_value(f"{path}.port", port.get("port", 0), _PORT_TEXT))
        name = port.get("name", "")
        if len(ports) > 1 and not name:
            errors.append(required(f"{path}.name"))
        elif name and name in names:
            errors.append(duplicate(f"{path}.name", name))
        names.add(name)
        if port.get("nodePort"):
            errors.append(
                forbidden_value(f"{path}.nodePort", "this control plane serves no node ports")
            )
    return errors


def _ingress(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors: list[FieldError] = []
    if not spec.get("rules") and not spec.get("defaultBackend"):
        errors.append(
            invalid_value("spec", spec, "either `defaultBackend` or `rules` must be specified")
        )
    for i, rule in enumerate(spec.get("rules") or ()):
        for j, path in enumerate((rule.get("http") or {}).get("paths") or ()):
            field = f"spec.rules[{i}].http.paths[{j}]"
            kinds = ("Exact", "ImplementationSpecific", "Prefix")
            if "pathType" not in path:
                errors.append(required(f"{field}.pathType", "pathType must be specified"))
            elif path["pathType"] not in kinds:
                errors.append(unsupported_value(f"{field}.pathType", path["pathType"], kinds))
            backend = path.get("backend") or {}
            if not backend.get("service") and not backend.get("resource"):
                errors.append(required(f"{field}.backend"))
    return errors


def _budget(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    if "minAvailable" in spec and "maxUnavailable" in spec:
        return [invalid_value("spec", spec, "minAvailable and maxUnavailable cannot be both set")]
    return []


def _lease(obj: Object) -> list[FieldError]:
    duration = (obj.get("spec") or {}).get("leaseDurationSeconds", 1)
    if duration <= 0:
        return [invalid_value("spec.leaseDurationSeconds", duration, "must be greater than 0")]
    return []


_CHECKS = {
    "Pod": _pod,
    "Deployment": _workload,
    "ReplicaSet": _workload,
    "Service": _service,
    "Ingress": _ingress,
    "PodDisruptionBudget": _budget,
    "Lease": _lease,
    "CustomResourceDefinition": validate_crd,
}


def _immutable(kind: str, obj: Object, old: Object) -> list[FieldError]:
    new_spec, old_spec = obj.get("spec") or {}, old.get("spec") or {}
    match kind:
        case "Deployment" | "ReplicaSet" if new_spec.get("selector") != old_spec.get("selector"):
            return [invalid_value("spec.selector", new_spec.get("selector"), "field is immutable")]
        case "Service" if (
            old_spec.get("clusterIP") and new_spec.get("clusterIP") != old_spec["clusterIP"]
        ):
            return [
                invalid_value("spec.clusterIP", new_spec.get("clusterIP", ""), "field is immutable")
            ]
        case "Secret" if obj.get("type") != old.get("type"):
            return [invalid_value("type", obj.get("type"), "field is immutable")]
        case "Secret" | "ConfigMap" if old.get("immutable"):
            if any(
                obj.get(field) != old.get(field) for field in ("data", "binaryData", "immutable")
            ):
                return [forbidden_value("data", "field is immutable when `immutable` is set")]
        case "Pod" if _fixed_pod_spec(new_spec) != _fixed_pod_spec(old_spec):
            return [
                forbidden_value(
                    "spec",
                    "pod updates may not change fields other than "
                    "`spec.containers[*].image`,`spec.initContainers[*].image`,"
                    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
                    "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 "
                    "if it was previously negative)",
                )
            ]
        case "CustomResourceDefinition":
            for field in ("group", "scope"):
                if new_spec.get(field) != old_spec.get(field):
                    return [
                        invalid_value(f"spec.{field}", new_spec.get(field), "field is immutable")
                    ]
    return []


def _fixed_pod_spec(spec: Object) -> Object:
    fixed = {
        key: value
        for key, value in spec.items()
        if key not in ("activeDeadlineSeconds", "tolerations")
    }
    for group in ("containers", "initContainers"):
        fixed[group] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(group) or ()]
    return fixed
