"""NetworkPolicies: who may open a connection to engines and to the coordinator.

Engines listen on ports of their own choice besides the fixed ones (stores of ranks, gloo, lanes of the transfer), so members reach
each other on all of them. The gateway is the way in and has no policy here: who may come in is for the namespace's owner to say.
Nor is anything said of what pods may connect to: names, models and device fabrics are elsewhere.
"""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Object, Owner
from baton_protocol.config import ENGINE_HTTP_PORT, ENGINE_PORT
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT

OPERATOR_LABELS = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": "operator"}
"""Of the operator's pods, however it was installed."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Since Kubernetes 1.21 every namespace has it; before, it must be set on the operator's by hand."""


def members_policy(owner: Owner, operator_namespace: str | None) -> Object:
    """Of engines: work from the service's gateways, anything from each other, HTTP from the operator and who collects metrics."""
    members = {names.LABEL_SERVICE: owner.name, names.LABEL_MEMBER: "true"}
    rules = [
        {"from": [_pods(members)]},
        {"from": [_pods(names.selector(owner.name, "gateway"))], "ports": _ports(ENGINE_PORT)},
        _http(owner, ENGINE_HTTP_PORT, operator_namespace),
    ]
    return _policy(owner, names.members_service_name(owner.name), members, rules)


def kv_transfer_exposure(owner: Owner) -> dict[str, tuple[str, str, str]]:
    """Return the condition of a service whose KV transfers are open to strangers; empty if nothing is known to be.

    Whether the cluster enforces NetworkPolicies cannot be read from its API.
    """
    transport = owner.spec.kv_transfer.transport
    if owner.spec.security.network_policy or not owner.has_prefill or transport in ("tcp", "shm"):
        return {}
    message = (
        f"security.networkPolicy is off, and kvTransfer.transport {transport} listens on TCP ports without authentication: "
        "a client that reaches them can write to the memory of engines. Set security.networkPolicy to true, or "
        "kvTransfer.transport to tcp"
    )
    return {"KVTransferProtected": ("False", "NetworkPolicyOff", message)}


def coordinator_policy(owner: Owner, operator_namespace: str | None) -> Object:
    """Ranks report to it; the operator asks it, and collectors of metrics."""
    ranks = _pods(names.selector(owner.name, "decode"))
    rules = [
        {"from": [ranks], "ports": _ports(COORDINATOR_PORT)},
        _http(owner, COORDINATOR_HTTP_PORT, operator_namespace),
    ]
    selector = names.selector(owner.name, "coordinator")
    return _policy(owner, names.coordinator_name(owner.name), selector, rules)


def _http(owner: Owner, port: int, operator_namespace: str | None) -> Object:
    """Whoever may ask over HTTP; what changes something needs the service's key besides.

    Args:
        operator_namespace: of the operator's pod. None: it runs outside the cluster, where no selector finds it, so all may ask.
    """
    if operator_namespace is None:
        return {"ports": _ports(port)}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}},
        **_pods(OPERATOR_LABELS),
    }
    return {"from": [operator, *owner.spec.security.metrics_from], "ports": _ports(port)}


def _pods(labels: dict[str, str]) -> Object:
    """A peer: the pods with these labels, of the policy's own namespace if nothing else is said."""
    return {"podSelector": {"matchLabels": labels}}


def _ports(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _policy(owner: Owner, name: str, selector: dict[str, str], ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(name),
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
