"""The ServiceAccounts of a service's pods, and the gateway's right to watch pods and Services."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService


def engine_account(resolved: ResolvedService) -> Object:
    """Return the ServiceAccount of engines and coordinator, without a mounted token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": resolved.metadata(names.engine_account_name(resolved.name)),
        "automountServiceAccountToken": False,
    }


def gateway_account(resolved: ResolvedService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": resolved.metadata(names.gateway_name(resolved.name), "gateway"),
    }


def gateway_role(resolved: ResolvedService) -> Object:
    """Return the Role that lets the gateway list and watch pods and Services.

    The gateway discovers engines as pods. An annotation of the gateway's Service shows whether the
    service is scaled to zero by hand.
    """
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": resolved.metadata(names.gateway_name(resolved.name), "gateway"),
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}
        ],
    }


def gateway_role_binding(resolved: ResolvedService) -> Object:
    name = names.gateway_name(resolved.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": resolved.metadata(name, "gateway"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": resolved.namespace}],
    }
