"""PodDisruptionBudgets: node drains evict one pod of a group at a time."""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Object, Owner


def disruption_budget(owner: Owner, role: names.ConfiguredRole, api_version: str) -> Object | None:
    """`api_version` is policy/v1 or policy/v1beta1, as served.

    None for a group of one pod: a budget could only block node drains for ever. Its eviction is a SIGTERM, upon which it finishes
    what it runs, and another pod is made.

    Member pods have no scale subresource above them, for which the API allows a plain minAvailable only.
    """
    replicas = owner.spec.gateway.replicas if role == "gateway" else owner.replicas(role)
    if replicas < 2:
        return None
    return {
        "apiVersion": api_version,
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(f"{owner.name}-{role}", role),
        "spec": {
            "minAvailable": replicas - 1,
            "selector": {"matchLabels": names.selector(owner.name, role)},
        },
    }
