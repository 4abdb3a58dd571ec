"""The Secrets and ConfigMaps that a pod needs, and whether the pod may wait for them. Pure.

`status_probes.find_missing` finds out which of them do not exist.
"""

from __future__ import annotations

from baton_kube.client import SERVICE_ACCOUNT, Object
from baton_operator.observe.observation import Reference, has_ended

_REFERENCE_FIELDS = (
    *(("Secret", field) for field in ("secret", "secretRef", "secretKeyRef")),
    *(("ConfigMap", field) for field in ("configMap", "configMapRef", "configMapKeyRef")),
)


def may_lack_objects(pod: Object) -> bool:
    """Return whether the pod is scheduled and may wait for Secrets or ConfigMaps to exist."""
    status = pod.get("status") or {}
    if not (pod.get("spec") or {}).get("nodeName") or has_ended(pod):
        return False
    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    states = [container.get("state") or {} for container in containers]
    if any(
        (state.get("waiting") or {}).get("reason") == "CreateContainerConfigError"
        for state in states
    ):
        return True
    # Volumes are mounted before the first container runs.
    ran = any(state.get(kind) is not None for state in states for kind in ("running", "terminated"))
    return not ran and not any(container.get("lastState") for container in containers)


def references(pod: Object) -> dict[Reference, str]:
    """Return the Secrets and ConfigMaps that must exist before the pod starts, as keys of a dict.

    Each value names the part of the pod's spec that needs the object, for example `volume tls`.
    """
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    mounts = [mount for container in containers for mount in container.get("volumeMounts") or []]
    # The volume with the service account's token is skipped: Kubernetes creates its sources.
    account = {mount["name"] for mount in mounts if mount["mountPath"] == str(SERVICE_ACCOUNT)}
    sources: list[tuple[str, Object]] = []
    for volume in spec.get("volumes") or []:
        parts = [volume, *((volume.get("projected") or {}).get("sources") or [])]
        sources += [
            (f"volume {volume['name']}", part) for part in parts if volume["name"] not in account
        ]
    for container in containers:
        parts = [variable.get("valueFrom") or {} for variable in container.get("env") or []]
        where = f"environment of container {container['name']}"
        sources += [(where, part) for part in [*(container.get("envFrom") or []), *parts]]
    found: dict[Reference, str] = {}
    for where, source in sources:
        for kind, field in _REFERENCE_FIELDS:
            named = source.get(field)
            if named and not named.get("optional"):
                found.setdefault(
                    Reference(kind, named.get("secretName") or named.get("name") or ""), where
                )
    return found
