"""Compute the next step of a Deployment's rollout: its ReplicaSets, their sizes and its status."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import datetime

from baton_kube.client import Object
from pocketkube.controllers.replicaset import desired_replicas, owner_reference
from pocketkube.timestamps import timestamp

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


@dataclass
class DeploymentPlan:
    """The next step of a Deployment's rollout."""

    #: The ReplicaSet to create for the current pod template; None to create none.
    create: Object | None = None
    #: New sizes: ReplicaSet name -> replicas.
    scale: dict[str, int] = field(default_factory=dict)
    #: Names of old ReplicaSets beyond the history limit.
    delete: list[str] = field(default_factory=list)
    status: Object = field(default_factory=dict)


def template_hash(template: Object) -> str:
    """Return a hash of a pod template, as ten hexadecimal digits."""
    content = copy.deepcopy(template)
    (content.get("metadata") or {}).get("labels", {}).pop(HASH_LABEL, None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plan_deployment(
    deployment: Object, replica_sets: list[Object], now: datetime
) -> DeploymentPlan:
    """Compute the next step of the rollout. Call this again after each change of a ReplicaSet.

    Args:
        replica_sets: the ReplicaSets that the Deployment owns.
    """
    wanted = template_hash(deployment["spec"]["template"])
    live = [rs for rs in replica_sets if not rs["metadata"].get("deletionTimestamp")]
    new = next(
        (rs for rs in live if rs["metadata"].get("labels", {}).get(HASH_LABEL) == wanted), None
    )
    old = [rs for rs in live if rs is not new]
    plan = DeploymentPlan(status=deployment_status(deployment, new, live, now))
    spec = deployment["spec"]
    if deployment["metadata"].get("deletionTimestamp") or spec.get("paused"):
        return plan
    recreate = (spec.get("strategy") or {}).get("type") == "Recreate"
    if recreate:
        plan.scale = {_name(rs): 0 for rs in old if desired_replicas(rs) > 0}
        if any(_current(rs) > 0 for rs in old):
            return plan  # the old pods still exist
        size = desired_replicas(deployment)
    else:
        size = _new_size(deployment, new, old)
    if new is None:
        revision = max(map(_revision, old), default=0) + 1
        plan.create = replica_set_of(deployment, wanted, size, revision)
        return plan
    if desired_replicas(new) != size:
        plan.scale[_name(new)] = size
    if not recreate:
        plan.scale |= _scale_down_old(deployment, new, old)
    limit = spec.get("revisionHistoryLimit")
    finished = sorted(
        (rs for rs in old if desired_replicas(rs) == 0 and _current(rs) == 0), key=_revision
    )
    plan.delete = [
        _name(rs) for rs in finished[: max(len(finished) - (10 if limit is None else limit), 0)]
    ]
    return plan


def replica_set_of(deployment: Object, template_name: str, replicas: int, revision: int) -> Object:
    """Build a ReplicaSet from the Deployment's current pod template.

    Args:
        template_name: the template's hash, which becomes part of the ReplicaSet's name.
    """
    template = copy.deepcopy(deployment["spec"]["template"])
    template.setdefault("metadata", {}).setdefault("labels", {})[HASH_LABEL] = template_name
    selector = copy.deepcopy(deployment["spec"]["selector"])
    selector.setdefault("matchLabels", {})[HASH_LABEL] = template_name
    return {
        "kind": "ReplicaSet",
        "apiVersion": "apps/v1",
        "metadata": {
            "name": f"{deployment['metadata']['name']}-{template_name}",
            "namespace": deployment["metadata"]["namespace"],
            "labels": template["metadata"]["labels"],
            "annotations": {REVISION: str(revision)},
            "ownerReferences": [owner_reference(deployment, "Deployment")],
        },
        "spec": {"replicas": replicas, "selector": selector, "template": template},
    }


def rolling_limits(deployment: Object) -> tuple[int, int]:
    """Return (maxSurge, maxUnavailable) as numbers of pods.

    Percentages are rounded up for maxSurge and down for maxUnavailable. If both numbers would be 0,
    maxUnavailable is 1.
    """
    rolling = (deployment["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    desired = desired_replicas(deployment)
    surge = _resolve(rolling.get("maxSurge", "25%"), desired, up=True)
    unavailable = _resolve(rolling.get("maxUnavailable", "25%"), desired, up=False)
    return surge, unavailable if surge or unavailable else 1


def deployment_status(
    deployment: Object, new: Object | None, live: list[Object], now: datetime
) -> Object:
    """Compute the Deployment's status: pod counts and the condition Available.

    Args:
        new: the ReplicaSet of the current pod template; None if there is none.
        live: all ReplicaSets of the Deployment that are not being deleted.
    """
    desired = desired_replicas(deployment)
    _, max_unavailable = rolling_limits(deployment)
    available = sum(map(_available, live))
    enough = available >= desired - max_unavailable
    value = "True" if enough else "False"
    before = (deployment.get("status") or {}).get("conditions") or []
    # The transition time stays while the value stays.
    same = next((c for c in before if c["type"] == "Available" and c["status"] == value), None)
    condition = {
        "type": "Available",
        "status": value,
        "reason": "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable",
        "message": f"{available} of {desired} pods are available",
        "lastTransitionTime": same["lastTransitionTime"] if same else timestamp(now),
    }
    return {
        "observedGeneration": deployment["metadata"].get("generation", 1),
        "replicas": sum(map(_current, live)),
        "updatedReplicas": _current(new) if new else 0,
        "readyReplicas": sum((rs.get("status") or {}).get("readyReplicas", 0) for rs in live),
        "availableReplicas": available,
        "unavailableReplicas": max(desired - available, 0),
        "conditions": [condition],
    }


def _new_size(deployment: Object, new: Object | None, old: list[Object]) -> int:
    """Return the number of replicas to set in the new ReplicaSet, limited by maxSurge."""
    desired = desired_replicas(deployment)
    surge, _ = rolling_limits(deployment)
    current = desired_replicas(new) if new else 0
    if current >= desired:
        return desired
    room = desired + surge - current - sum(max(desired_replicas(rs), _current(rs)) for rs in old)
    return min(desired, current + max(room, 0))


def _scale_down_old(deployment: Object, new: Object, old: list[Object]) -> dict[str, int]:
    """Return the new sizes of the old ReplicaSets that must shrink: name -> replicas.

    Unavailable pods are removed first. Available pods are removed only while at least
    `replicas - maxUnavailable` pods stay available.
    """
    _, max_unavailable = rolling_limits(deployment)
    minimum = desired_replicas(deployment) - max_unavailable
    by_age = sorted((rs for rs in old if desired_replicas(rs) > 0), key=_revision)
    sizes = {_name(rs): desired_replicas(rs) for rs in by_age}
    # Remove unavailable pods while at least `minimum` pods stay. Only available pods of the new
    # ReplicaSet count, but all pods of the old ReplicaSets.
    spare = max(sum(sizes.values()) + _available(new) - minimum, 0)
    for rs in by_age:
        step = min(max(sizes[_name(rs)] - _available(rs), 0), spare)
        sizes[_name(rs)] -= step
        spare -= step
    # Then remove other pods, while `minimum` available pods stay.
    available = sum(min(_available(rs), sizes[_name(rs)]) for rs in by_age) + _available(new)
    spare = max(available - minimum, 0)
    for rs in by_age:
        step = min(sizes[_name(rs)], spare)
        sizes[_name(rs)] -= step
        spare -= step
    return {
        _name(rs): sizes[_name(rs)] for rs in by_age if sizes[_name(rs)] != desired_replicas(rs)
    }


def _resolve(value: int | str, total: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * total / 100
    return math.ceil(share) if up else math.floor(share)


def _revision(replica_set: Object) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _current(replica_set: Object) -> int:
    return int((replica_set.get("status") or {}).get("replicas", 0))


def _available(replica_set: Object) -> int:
    return int((replica_set.get("status") or {}).get("availableReplicas", 0))
