"""PodDisruptionBudgets, with which a node drain evicts the pods of a group one at a time."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.absent import Absent
from baton_operator.builders.resolved_service import ResolvedService


def build(
    resolved: ResolvedService, role: names.ConfiguredRole, api_version: str
) -> Object | Absent:
    """Return the PodDisruptionBudget of a group; Absent if the group has fewer than two pods.

    A budget for one pod would block node drains.

    The budget sets `minAvailable` to an integer. For a percentage or `maxUnavailable`, Kubernetes
    would read the number of member pods from the scale subresource of the LLMService. That
    subresource shows only `spec.decode.replicas`.

    Args:
        api_version: policy/v1 or policy/v1beta1, whichever the API server has.
    """
    name = f"{resolved.name}-{role}"
    replicas = resolved.spec.gateway.replicas if role == "gateway" else resolved.replicas(role)
    if replicas < 2:
        return Absent("PodDisruptionBudget", name)
    return {
        "apiVersion": api_version,
        "kind": "PodDisruptionBudget",
        "metadata": resolved.metadata(name, role),
        "spec": {
            "minAvailable": replicas - 1,
            "selector": {"matchLabels": names.selector(resolved.name, role)},
        },
    }
