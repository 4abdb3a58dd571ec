"""NetworkPolicies that limit which pods may connect to engines and to the coordinator.

Members may connect to each other on all ports, because engines also listen on random ports for rank
stores, gloo and KV transports. Connections to the gateway are not restricted, because the owner of
the namespace decides which clients may connect. Outgoing connections are not restricted either.
"""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.absent import Absent
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import ENGINE_HTTP_PORT, ENGINE_PORT
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT

#: Labels of the operator's pods in every kind of installation.
OPERATOR_LABELS = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": "operator"}
#: Every namespace has this label since Kubernetes 1.21. On older clusters, set it on the operator's
#: namespace.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def build_members(resolved: ResolvedService, operator_namespace: str | None) -> Object | Absent:
    """Return the NetworkPolicy of engines; Absent if the spec turns it off.

    The policy admits requests from the service's gateways, connections between engines, and HTTP
    requests from the operator and from metrics collectors.
    """
    name = names.members_service_name(resolved.name)
    if not resolved.spec.security.network_policy:
        return Absent("NetworkPolicy", name)
    members = {names.LABEL_SERVICE: resolved.name, names.LABEL_MEMBER: "true"}
    rules = [
        {"from": [_pods(members)]},
        {"from": [_pods(names.selector(resolved.name, "gateway"))], "ports": _ports(ENGINE_PORT)},
        _http(resolved, ENGINE_HTTP_PORT, operator_namespace),
    ]
    return _policy(resolved, name, members, rules)


def build_coordinator(
    resolved: ResolvedService, operator_namespace: str | None, *, has_coordinator: bool
) -> Object | Absent:
    """Return the NetworkPolicy of the coordinator.

    The policy admits connections from ranks, and HTTP requests from the operator and from metrics
    collectors.

    Returns:
        Absent if the spec turns the policy off, or the service has no coordinator.
    """
    name = names.coordinator_name(resolved.name)
    if not (resolved.spec.security.network_policy and has_coordinator):
        return Absent("NetworkPolicy", name)
    ranks = _pods(names.selector(resolved.name, "decode"))
    rules = [
        {"from": [ranks], "ports": _ports(COORDINATOR_PORT)},
        _http(resolved, COORDINATOR_HTTP_PORT, operator_namespace),
    ]
    selector = names.selector(resolved.name, "coordinator")
    return _policy(resolved, name, selector, rules)


def _http(resolved: ResolvedService, port: int, operator_namespace: str | None) -> Object:
    """Return the ingress rule that admits the operator and metrics collectors to the HTTP port.

    Args:
        operator_namespace: namespace of the operator's pod. None: the operator runs outside the
            cluster. The rule then admits every peer, because no selector can match the operator.
    """
    if operator_namespace is None:
        return {"ports": _ports(port)}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}},
        **_pods(OPERATOR_LABELS),
    }
    return {"from": [operator, *resolved.spec.security.metrics_from], "ports": _ports(port)}


def _pods(labels: dict[str, str]) -> Object:
    """Return a NetworkPolicyPeer that selects the pods with these labels.

    Without a namespaceSelector, only pods in the namespace of the policy match.
    """
    return {"podSelector": {"matchLabels": labels}}


def _ports(port: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"}]


def _policy(
    resolved: ResolvedService, name: str, selector: dict[str, str], ingress: list[Object]
) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": resolved.metadata(name),
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
