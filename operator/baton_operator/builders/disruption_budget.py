"""PodDisruptionBudgets, so that node drains evict one pod of a group at a time."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def disruption_budget(
    resolved: ResolvedService, role: names.ConfiguredRole, api_version: str
) -> Object | None:
    """Return the budget of a group; None for a group of one pod.

    A budget for one pod could only block node drains. An evicted pod gets SIGTERM and finishes its
    requests, and the operator creates another pod.

    Member pods have no controller with a scale subresource. For those the API allows only an
    integer `minAvailable`.

    Args:
        api_version: policy/v1 or policy/v1beta1, as the API server serves it.
    """
    replicas = resolved.spec.gateway.replicas if role == "gateway" else resolved.replicas(role)
    if replicas < 2:
        return None
    return {
        "apiVersion": api_version,
        "kind": "PodDisruptionBudget",
        "metadata": resolved.metadata(f"{resolved.name}-{role}", role),
        "spec": {
            "minAvailable": replicas - 1,
            "selector": {"matchLabels": names.selector(resolved.name, role)},
        },
    }
