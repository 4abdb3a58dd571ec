"""The operator's own account and its rights: the least with which it works. A test compares them with an audit log.

With `--namespace` the same rules are Roles in these namespaces (charts/baton), and nothing is granted beyond them.
"""

from __future__ import annotations

from baton_operator.builders.network_policy import NAMESPACE_LABEL, OPERATOR_LABELS
from baton_operator.builders.owner import Object
from baton_operator.names import GROUP, MANAGER, PLURAL

NAMESPACE = "baton-system"
LABELS = OPERATOR_LABELS
LEASE_ROLE = f"{MANAGER}-lease"
RBAC = "rbac.authorization.k8s.io/v1"


def objects() -> list[Object]:
    """Return all objects, in the order of creation."""
    return [namespace(), service_account(), cluster_role(), cluster_role_binding(), lease_role(), lease_role_binding()]


def metadata(namespaced: bool = True) -> Object:
    return {"name": MANAGER, **({"namespace": NAMESPACE} if namespaced else {}), "labels": LABELS}


def namespace() -> Object:
    # Servers before 1.21 do not label it themselves, and network policies of services find the operator by it.
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {NAMESPACE_LABEL: NAMESPACE}},
    }


def service_account() -> Object:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata()}


def cluster_role() -> Object:
    kept = ["get", "list", "watch", "create", "patch"]
    owned = [*kept, "delete"]
    granted = (
        ([GROUP], [PLURAL], ["get", "list", "watch"]),
        ([GROUP], [f"{PLURAL}/status"], ["patch"]),
        ([GROUP], [f"{PLURAL}/finalizers"], ["update"]),  # to set blockOwnerDeletion
        ([""], ["pods", "services", "configmaps"], owned),
        # Services' keys, read by name and never listed or watched. RBAC has no patterns of names.
        ([""], ["secrets"], ["get", "create"]),
        ([""], ["serviceaccounts"], kept),
        ([""], ["events"], ["get", "create", "patch"]),
        (["apps"], ["deployments"], owned),
        (["apps"], ["controllerrevisions"], ["list", "create", "delete"]),
        (["networking.k8s.io"], ["ingresses", "networkpolicies"], owned),
        (["gateway.networking.k8s.io"], ["httproutes"], owned),  # where the cluster has the Gateway API
        (["policy"], ["poddisruptionbudgets"], owned),
        # A gateway may watch the pods of its namespace. The operator can grant only rights that it has itself.
        (["rbac.authorization.k8s.io"], ["roles", "rolebindings"], kept),
    )
    rules = [{"apiGroups": groups, "resources": resources, "verbs": verbs} for groups, resources, verbs in granted]
    return {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": metadata(namespaced=False), "rules": rules}


def cluster_role_binding() -> Object:
    return _binding("ClusterRoleBinding", metadata(namespaced=False), "ClusterRole")


def lease_role() -> Object:
    """For the leader election, in the operator's own namespace."""
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    rules = [
        {**leases, "verbs": ["create"]},  # RBAC cannot restrict create to a name
        {**leases, "resourceNames": [MANAGER], "verbs": ["get", "update"]},
    ]
    return {"apiVersion": RBAC, "kind": "Role", "metadata": metadata() | {"name": LEASE_ROLE}, "rules": rules}


def lease_role_binding() -> Object:
    return _binding("RoleBinding", metadata() | {"name": LEASE_ROLE}, "Role")


def _binding(kind: str, metadata: Object, role: str) -> Object:
    return {
        "apiVersion": RBAC,
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": metadata["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": MANAGER, "namespace": NAMESPACE}],
    }
