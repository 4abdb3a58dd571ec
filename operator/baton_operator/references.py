"""Secrets and ConfigMaps that pods need and nobody made: the kubelet waits for them, and the pod's status names none that a volume
is made of. Asked for by name, and only whether they exist: what is in them never comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from baton_kube.client import KubeError
from baton_operator.kube import Kube

Object = dict[str, Any]

MAX_ASKED = 16
"""Of one service in one reconcile: conditions tell of the first one."""
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""What the API server mounts there by itself it also makes."""
_CANNOT_START = ("CreateContainerConfigError",)
_IN_ENVIRONMENT = (("Secret", "secretRef", "secretKeyRef"), ("ConfigMap", "configMapRef", "configMapKeyRef"))


class Reference(NamedTuple):
    kind: str
    """Secret or ConfigMap."""
    name: str


def references(pod: Object) -> dict[Reference, str]:
    """What the pod cannot start without, and where it says so."""
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
    """Whether it waits on its node for what may not exist: before its first container, or with one that cannot be configured."""
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


async def find_missing(
    kube: Kube, namespace: str, pods: list[Object], known: Collection[Reference]
) -> frozenset[Reference]:
    """What `pods` wait for that does not exist.

    Args:
        known: to exist; not asked for.
    """
    wanted = {reference for pod in pods if may_lack_objects(pod) for reference in references(pod)}
    asked = sorted(wanted - set(known))[:MAX_ASKED]
    exists = await asyncio.gather(*(_exists(kube, namespace, reference) for reference in asked))
    return frozenset(reference for reference, there in zip(asked, exists, strict=True) if not there)


async def _exists(kube: Kube, namespace: str, reference: Reference) -> bool:
    """True also if that cannot be known: nothing is claimed then."""
    try:
        return await kube.exists(reference.kind, namespace, reference.name)
    except (KubeError, OSError):
        return True


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
