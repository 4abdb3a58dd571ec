"""The RoleBinding of the gateway's ServiceAccount to the gateway's Role."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object:
    name = names.gateway_name(resolved.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": resolved.metadata(name, "gateway"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": resolved.namespace}],
    }
