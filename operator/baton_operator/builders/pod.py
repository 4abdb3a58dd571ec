"""What member pods and gateway pods have in common: configuration, model, addresses, probes, security."""

from __future__ import annotations

from typing import Any

from baton_operator import names
from baton_operator.api import Template
from baton_operator.builders import config, kv_token, model, overlay
from baton_operator.builders.owner import Object, Owner

TERMINATION_MARGIN_S = 15
"""Between the end of the component's own drain and SIGKILL."""


def pod_template(
    owner: Owner,
    role: names.ConfiguredRole,
    *,
    container: Object,
    pod: Object,
    template: Template | None,
    resources: dict[str, Any] | None,
) -> Object:
    """Pod template of `role`: `container` and `pod` completed by what all pods share, under the user's overlay.

    Raises:
        ValueError: the overlay cannot be merged, or takes away what the operator needs; the message names the field.
    """
    volume, mount = model.volume(owner.spec.model.uri)
    volumes, mounts = [volume], [mount]
    if role != "gateway" and owner.has_prefill:
        volumes.append(kv_token.volume(owner))
        mounts.append(kv_token.mount())
    container = {
        "image": owner.spec.image,
        "volumeMounts": [
            {"name": "config", "mountPath": config.MOUNT_PATH, "readOnly": True},
            *mounts,
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": restricted(),
        **container,
    }
    if resources:
        container["resources"] = resources
    config_map = config.config_map(owner, role)["metadata"]["name"]
    built = {
        "metadata": {"labels": names.labels(owner.name, role)},
        "spec": {
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": config_map}},
                *volumes,
                {"name": "tmp", "emptyDir": {}},
            ],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": owner.spec.drain_timeout_seconds + TERMINATION_MARGIN_S,
            **pod,
        },
    }
    merged: Object = overlay.merge(built, template or {})
    for path, field in (
        ("metadata", merged.get("metadata")),
        ("metadata.labels", (merged.get("metadata") or {}).get("labels")),
        ("spec", merged.get("spec")),
    ):
        if not isinstance(field, dict):
            raise ValueError(f"template: {path} must be an object, got {field!r}")
    merged["metadata"] = {key: value for key, value in merged["metadata"].items() if key in ("labels", "annotations")}
    merged["metadata"]["labels"] |= names.labels(owner.name, role)  # selectors depend on them
    return merged


def restricted() -> Object:
    """Security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def identity_env(**more: str) -> list[Object]:
    """Environment by which a component knows its pod; `more` are plain values."""
    fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    env: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields.items()
    ]
    return env + [{"name": name, "value": value} for name, value in more.items()]


def http_probe(path: str, *, period_s: int, failures: int, timeout_s: int = 5) -> Object:
    """Probe of the port named http. `failures` in a row, `period_s` apart, count as failed."""
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }
