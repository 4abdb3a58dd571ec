"""An evaluator of NetworkPolicies for incoming connections.

The rules are those of https://kubernetes.io/docs/concepts/services-networking/network-policies/. A
pod without a policy accepts all connections. Any other pod accepts a connection if at least one
rule of its policies allows the connection. Peers of a rule are ORed, and the selectors of a peer
are ANDed. A missing `from` or `ports` means all.
"""

from __future__ import annotations

import ipaddress

import msgspec

from baton_kube.client import Object


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection."""

    namespace: str
    labels: dict[str, str] = {}
    ip: str = "10.1.0.1"
    #: Ports of the container by name.
    ports: dict[str, int] = {}


def admits(
    policies: list[Object],
    namespaces: dict[str, dict[str, str]],
    source: Pod,
    target: Pod,
    port: int,
) -> bool:
    """Return whether `source` can open a TCP connection to `port` of `target`.

    Args:
        policies: all NetworkPolicies of the cluster.
        namespaces: name of each namespace -> labels.
    """
    selecting = [policy["spec"] for policy in policies if _selects(policy, target)]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get("ingress") or []]
    return any(
        _from(rule, target.namespace, namespaces, source) and _to(rule.get("ports"), target, port)
        for rule in rules
    )


def _selects(policy: Object, pod: Pod) -> bool:
    spec = policy["spec"]
    incoming = "Ingress" in spec.get("policyTypes", ["Ingress"])
    return (
        incoming
        and policy["metadata"]["namespace"] == pod.namespace
        and _match(spec["podSelector"], pod.labels)
    )


def _from(
    rule: Object, own_namespace: str, namespaces: dict[str, dict[str, str]], source: Pod
) -> bool:
    peers = rule.get("from")
    return not peers or any(_is_peer(peer, own_namespace, namespaces, source) for peer in peers)


def _is_peer(
    peer: Object, own_namespace: str, namespaces: dict[str, dict[str, str]], source: Pod
) -> bool:
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(source.ip)
        excepted = any(address in ipaddress.ip_network(cidr) for cidr in block.get("except") or [])
        return address in ipaddress.ip_network(block["cidr"]) and not excepted
    if "namespaceSelector" in peer:
        if not _match(peer["namespaceSelector"], namespaces[source.namespace]):
            return False
    elif source.namespace != own_namespace:
        return False
    return "podSelector" not in peer or _match(peer["podSelector"], source.labels)


def _to(ports: list[Object] | None, target: Pod, port: int) -> bool:
    if not ports:
        return True
    for each in ports:
        if each.get("protocol", "TCP") != "TCP":
            continue
        wanted = each.get("port")
        first = target.ports.get(wanted) if isinstance(wanted, str) else wanted
        if wanted is None or (first is not None and first <= port <= each.get("endPort", first)):
            return True
    return False


def _match(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches. An empty selector matches everything."""
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions") or []:
        key, operator, values = (
            expression["key"],
            expression["operator"],
            expression.get("values") or [],
        )
        right = {
            "In": labels.get(key) in values,
            "NotIn": key not in labels or labels[key] not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[operator]
        if not right:
            return False
    return True
