"""Network policies of a service, evaluated for all relevant pairs of pods.

`admits` evaluates them by the rules of
https://kubernetes.io/docs/concepts/services-networking/network-policies/. A pod without a policy
accepts all connections. Any other pod accepts a connection if at least one rule of its policies
allows the connection. Peers of a rule are ORed, and the selectors of a peer are ANDed. A missing
`from` or `ports` means all.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from baton_kube.client import Object
from baton_operator.builders import coordinator_deployment
from baton_operator.builders.gateway import gateway_deployment
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.reconcile.desired import compute_desired
from baton_protocol.options.config import ENGINE_HTTP_PORT, ENGINE_PORT, GATEWAY_PORT, KV_PORT
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT
from support.operator.services import resolved


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


ROOT = Path(__file__).parents[4]
#: A random port of a rank store, of gloo or of a KV transport.
CHOSEN_PORT = 41234
OPERATOR_NAMESPACE = "baton-system"
NAMESPACES = {
    "default": {"kubernetes.io/metadata.name": "default"},
    "other": {"kubernetes.io/metadata.name": "other"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
    OPERATOR_NAMESPACE: {"kubernetes.io/metadata.name": OPERATOR_NAMESPACE},
}
SPEC: dict[str, Any] = {"prefill": {}, "decode": {"replicas": 2, "parallelism": {"expert": True}}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def policies(
    service: ResolvedService, operator_namespace: str | None = OPERATOR_NAMESPACE
) -> list[Object]:
    objects = compute_desired(service, None, operator_namespace=operator_namespace).objects
    return [obj for obj in objects if obj["kind"] == "NetworkPolicy"]


def pods(name: str, namespace: str = "default") -> dict[str, Pod]:
    """Return a pod of each role of a service."""
    service = resolved(name, coordinator="10.0.0.1", **SPEC)
    labels = {
        role: MemberTemplate(service, role).pod(0)["metadata"]["labels"]
        for role in ("prefill", "decode")
    }
    labels["gateway"] = gateway_deployment.build(service)["spec"]["template"]["metadata"]["labels"]
    labels["coordinator"] = coordinator_deployment.build(service)["spec"]["template"]["metadata"][
        "labels"
    ]
    return {role: Pod(namespace=namespace, labels=found) for role, found in labels.items()}


def operator() -> Pod:
    documents = yaml.safe_load_all((ROOT / "manifests/operator.yaml").read_text())
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    return Pod(namespace=OPERATOR_NAMESPACE, labels=template["metadata"]["labels"])


def sources() -> dict[str, Pod]:
    mine = pods("demo")
    return {
        **mine,
        "operator": operator(),
        "gateway of another service": pods("alien")["gateway"],
        "engine of another service": pods("alien")["decode"],
        "coordinator of another service": pods("alien")["coordinator"],
        "a service of the same name in another namespace": pods("demo", "other")["decode"],
        "its gateway": pods("demo", "other")["gateway"],
        "a pod of the namespace": Pod(namespace="default", labels={"app": "web"}),
        "a pod of another namespace": Pod(namespace="other", labels={"app": "web"}),
        "a pod of the operator's namespace": Pod(
            namespace=OPERATOR_NAMESPACE, labels={"app": "web"}
        ),
        "somebody with the operator's labels": Pod(namespace="other", labels=operator().labels),
        "prometheus": Pod(namespace="monitoring", labels={"app": "prometheus"}),
    }


ENGINE_PORTS = (ENGINE_PORT, KV_PORT, ENGINE_HTTP_PORT, CHOSEN_PORT)
COORDINATOR_PORTS = (COORDINATOR_PORT, COORDINATOR_HTTP_PORT, CHOSEN_PORT)
ALLOWED: dict[str, dict[str, tuple[int, ...]]] = {
    "prefill": {
        "prefill": ENGINE_PORTS,
        "decode": ENGINE_PORTS,
        "gateway": (ENGINE_PORT,),
        "operator": (ENGINE_HTTP_PORT,),
    },
    "coordinator": {"decode": (COORDINATOR_PORT,), "operator": (COORDINATOR_HTTP_PORT,)},
}
ALLOWED["decode"] = ALLOWED["prefill"]


@pytest.mark.parametrize("target", ["prefill", "decode", "coordinator"])
def test_engines_and_coordinator_are_reachable_by_the_service_and_the_operator_only(
    target: str,
) -> None:
    applied = [
        *policies(resolved(coordinator="10.0.0.1", **SPEC)),
        *policies(resolved("alien", coordinator="10.0.0.1", **SPEC)),
    ]
    ports = COORDINATOR_PORTS if target == "coordinator" else ENGINE_PORTS
    reached = {
        (name, port)
        for name, source in sources().items()
        for port in ports
        if admits(applied, NAMESPACES, source, pods("demo")[target], port)
    }
    assert reached == {(name, port) for name, ports in ALLOWED[target].items() for port in ports}


def test_the_gateway_is_reachable_by_all_pods() -> None:
    applied = policies(resolved(coordinator="10.0.0.1", **SPEC))
    for name, source in sources().items():
        assert admits(applied, NAMESPACES, source, pods("demo")["gateway"], GATEWAY_PORT), name


def test_scrapers_reach_only_the_http_ports() -> None:
    applied = policies(
        resolved(coordinator="10.0.0.1", security={"metricsFrom": [MONITORING]}, **SPEC)
    )
    prometheus, web = sources()["prometheus"], sources()["a pod of the namespace"]
    for role, http in (
        ("prefill", ENGINE_HTTP_PORT),
        ("decode", ENGINE_HTTP_PORT),
        ("coordinator", COORDINATOR_HTTP_PORT),
    ):
        target = pods("demo")[role]
        ports = {*ENGINE_PORTS, *COORDINATOR_PORTS}
        assert {
            port for port in ports if admits(applied, NAMESPACES, prometheus, target, port)
        } == {http}
        assert not any(admits(applied, NAMESPACES, web, target, port) for port in ports)


def test_an_operator_outside_of_the_cluster_is_not_blocked() -> None:
    applied = policies(resolved(coordinator="10.0.0.1", **SPEC), operator_namespace=None)
    elsewhere = sources()["a pod of another namespace"]
    target = pods("demo")["decode"]
    assert [
        port for port in ENGINE_PORTS if admits(applied, NAMESPACES, elsewhere, target, port)
    ] == [ENGINE_HTTP_PORT]


def test_policies_can_be_disabled_and_are_deleted_with_the_coordinator() -> None:
    names = ("demo-members", "demo-coordinator")
    off = compute_desired(
        resolved(coordinator="10.0.0.1", security={"networkPolicy": False}, **SPEC), None
    )
    assert {("NetworkPolicy", name) for name in names} <= set(off.absent)
    assert not [obj for obj in off.objects if obj["kind"] == "NetworkPolicy"]
    assert [policy["metadata"]["name"] for policy in policies(resolved())] == ["demo-members"]
    assert ("NetworkPolicy", "demo-coordinator") in compute_desired(resolved(), None).absent
    kept = compute_desired(resolved(), None, keep_coordinator=True)
    assert ("NetworkPolicy", "demo-coordinator") not in kept.absent


def test_policies_are_created_before_the_pods() -> None:
    kinds = [
        obj["kind"]
        for obj in compute_desired(resolved(coordinator="10.0.0.1", **SPEC), None).objects
    ]
    assert max(i for i, kind in enumerate(kinds) if kind == "NetworkPolicy") < kinds.index(
        "Deployment"
    )


def test_the_evaluator_supports_ip_blocks_expressions_named_ports_and_port_ranges() -> None:
    def policy(rule: Object) -> list[Object]:
        spec = {"podSelector": {}, "ingress": [rule]}
        return [{"metadata": {"namespace": "default"}, "spec": spec}]

    target = Pod(namespace="default", ports={"http": 8000})
    web = Pod(namespace="other", labels={"app": "web"}, ip="10.2.0.9")
    block = {"ipBlock": {"cidr": "10.2.0.0/16", "except": ["10.2.1.0/24"]}}
    assert admits(policy({"from": [block]}), NAMESPACES, web, target, 1)
    excepted = Pod(namespace="other", ip="10.2.1.9")
    assert not admits(policy({"from": [block]}), NAMESPACES, excepted, target, 1)
    some = {
        "namespaceSelector": {},
        "podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
    }
    assert admits(policy({"from": [some]}), NAMESPACES, web, target, 1)
    assert not admits(policy({"from": [some]}), NAMESPACES, excepted, target, 1)
    assert admits(policy({"ports": [{"port": "http"}]}), NAMESPACES, web, target, 8000)
    assert not admits(policy({"ports": [{"port": "http"}]}), NAMESPACES, web, target, 8001)
    assert admits(policy({"ports": [{"port": 5, "endPort": 9}]}), NAMESPACES, web, target, 7)
    assert not admits(
        policy({"ports": [{"port": 7, "protocol": "UDP"}]}), NAMESPACES, web, target, 7
    )
    assert not admits(
        [{"metadata": {"namespace": "default"}, "spec": {"podSelector": {}}}],
        NAMESPACES,
        web,
        target,
        7,
    )
    assert admits(policy({}), NAMESPACES, web, target, 7)
