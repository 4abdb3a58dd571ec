"""Secrets and ConfigMaps that pods cannot start without. Pure.

While one does not exist the kubelet waits, and the pod's status does not name it if it is for a volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton_kube.client import Object

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"  # the API server makes what it mounts here
_CANNOT_START = ("CreateContainerConfigError",)
_IN_ENVIRONMENT = (("Secret", "secretRef", "secretKeyRef"), ("ConfigMap", "configMapRef", "configMapKeyRef"))


class Reference(NamedTuple):
    kind: str  # Secret or ConfigMap
    name: str


def references(pod: Object) -> dict[Reference, str]:
    """Return what the pod cannot start without, and which part of its spec refers to it."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    mounts = [mount for container in containers for mount in container.get("volumeMounts") or []]
    account = {mount["name"] for mount in mounts if mount["mountPath"] == ACCOUNT_PATH}
    found: dict[Reference, str] = {}
    for volume in spec.get("volumes") or []:
        for reference in _of_volume(volume) if volume["name"] not in account else ():
            found.setdefault(reference, f"volume {volume['name']}")
    for container in containers:
        for reference in _of_environment(container):
            found.setdefault(reference, f"environment of container {container['name']}")
    return found


def may_lack_objects(pod: Object) -> bool:
    """Whether the pod is on a node, and its first container did not run yet or a container cannot be configured."""
    status = pod.get("status") or {}
    if not (pod.get("spec") or {}).get("nodeName") or status.get("phase") in ("Failed", "Succeeded"):
        return False
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    states = [container.get("state") or {} for container in containers]
    if any((state.get("waiting") or {}).get("reason") in _CANNOT_START for state in states):
        return True
    # Volumes are there before anything runs.
    ran = any(state.get(kind) is not None for state in states for kind in ("running", "terminated"))
    return not ran and not any(container.get("lastState") for container in containers)


def _of_volume(volume: Object) -> Iterator[Reference]:
    sources = [volume, *((volume.get("projected") or {}).get("sources") or [])]
    for source in sources:
        secret, config_map = source.get("secret"), source.get("configMap")
        if secret and not secret.get("optional"):
            yield Reference("Secret", secret.get("secretName") or secret.get("name") or "")
        if config_map and not config_map.get("optional"):
            yield Reference("ConfigMap", config_map.get("name") or "")


def _of_environment(container: Object) -> Iterator[Reference]:
    for kind, whole, one_key in _IN_ENVIRONMENT:
        sources = [source.get(whole) for source in container.get("envFrom") or []]
        sources += [(variable.get("valueFrom") or {}).get(one_key) for variable in container.get("env") or []]
        for source in sources:
            if source and not source.get("optional"):
                yield Reference(kind, source.get("name") or "")
