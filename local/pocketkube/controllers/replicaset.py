"""Compute how many pods a ReplicaSet creates, which pods it deletes, and its status."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_kube.client import Object
from pocketkube.conditions import TERMINAL_PHASES, has_condition


@dataclass
class ReplicaSetPlan:
    """The next step of one ReplicaSet."""

    #: Number of pods to create.
    create: int = 0
    #: Names of the pods to delete.
    delete: list[str] = field(default_factory=list)
    status: Object = field(default_factory=dict)


def owned_by(obj: Object, owner: Object) -> bool:
    """Return whether `obj` has a controller reference with the uid of `owner`."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(
        ref.get("controller") and ref["uid"] == owner["metadata"]["uid"] for ref in references
    )


def owner_reference(owner: Object, kind: str) -> Object:
    """Build a controller reference to `owner`, an apps/v1 object."""
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_active(pod: Object) -> bool:
    """Return whether the pod is neither finished nor terminating."""
    phase = (pod.get("status") or {}).get("phase")
    return phase not in TERMINAL_PHASES and not pod["metadata"].get("deletionTimestamp")


def plan_replica_set(replica_set: Object, pods: list[Object]) -> ReplicaSetPlan:
    """Compute the next step towards `spec.replicas`, and the status.

    Args:
        pods: the pods that the ReplicaSet owns, in any state.
    """
    active = [pod for pod in pods if is_active(pod)]
    desired = desired_replicas(replica_set)
    ready = sum(has_condition(pod, "Ready") for pod in active)
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "observedGeneration": replica_set["metadata"].get("generation", 1),
    }
    if replica_set["metadata"].get("deletionTimestamp"):
        return ReplicaSetPlan(status=status)
    surplus = len(active) - desired
    # Delete unassigned pods first, then pods that are not ready, then the youngest.
    active.sort(key=lambda pod: pod["metadata"].get("creationTimestamp", ""), reverse=True)
    active.sort(key=lambda pod: (bool(pod["spec"].get("nodeName")), has_condition(pod, "Ready")))
    return ReplicaSetPlan(
        create=max(-surplus, 0),
        delete=[pod["metadata"]["name"] for pod in active[: max(surplus, 0)]],
        status=status,
    )


def desired_replicas(obj: Object) -> int:
    """Return `spec.replicas`, or 1 if it is not set."""
    replicas = obj["spec"].get("replicas")
    return 1 if replicas is None else int(replicas)


def pod_of(replica_set: Object) -> Object:
    """Build a pod from the ReplicaSet's template. The API server generates the pod's name."""
    template = replica_set["spec"]["template"]
    metadata = template.get("metadata") or {}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "generateName": replica_set["metadata"]["name"] + "-",
            "labels": metadata.get("labels") or {},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner_reference(replica_set, "ReplicaSet")],
        },
        "spec": template["spec"],
    }
