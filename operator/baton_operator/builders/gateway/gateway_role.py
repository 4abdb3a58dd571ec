"""The gateway's Role."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object:
    """Return the Role that lets the gateway list and watch pods and Services.

    The gateway watches pods to discover engines. An annotation of the gateway's Service shows
    whether the service is scaled to zero by hand.
    """
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": resolved.metadata(names.gateway_name(resolved.name), "gateway"),
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}
        ],
    }
