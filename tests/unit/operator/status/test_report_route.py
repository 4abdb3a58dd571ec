"""GatewayReady, from the status of an HTTPRoute."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.report_route import diagnose_route
from support.operator.services import NOW, observed, pod, resolved, service


def condition(type_: str, status: str, reason: str = "Because", **more: Any) -> Object:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": f"words of {reason}",
        **more,
    }


def parent(*conditions: Object, name: str = "edge") -> Object:
    return {"parentRef": {"name": name, "namespace": "infra"}, "conditions": list(conditions)}


def route(*parents: Object, generation: int = 1) -> Object:
    metadata = {"name": "demo-gateway", "generation": generation}
    references = [{"kind": "Gateway", "name": "edge", "namespace": "infra", "sectionName": "https"}]
    return {
        "metadata": metadata,
        "spec": {"parentRefs": references},
        "status": {"parents": list(parents)},
    }


ACCEPTED = condition("Accepted", "True")
REFUSED = condition("Accepted", "False", "NotAllowedByListeners")
UNRESOLVED = condition("ResolvedRefs", "False", "BackendNotFound")

CASES: dict[str, tuple[Object, str | None, str]] = {
    "accepted": (route(parent(ACCEPTED, condition("ResolvedRefs", "True"))), None, ""),
    "accepted by one of two": (route(parent(REFUSED), parent(ACCEPTED, name="other")), None, ""),
    "no Gateway has reported a status": (
        route(), "RoutePending", "accepted by Gateway infra/edge (section https)",
    ),
    "a route without a status": (
        {"metadata": {"name": "r"}, "spec": {"parentRefs": [{"name": "g"}]}}, "RoutePending", "g",
    ),
    "a status without conditions": (route(parent()), "RoutePending", "infra/edge"),
    "refused": (
        route(parent(REFUSED)), "RouteNotAccepted",
        "Gateway infra/edge: Accepted is False, NotAllowedByListeners: "
        "words of NotAllowedByListeners",
    ),
    "its Service is not found": (
        route(parent(ACCEPTED, UNRESOLVED)), "RouteNotAccepted", "ResolvedRefs is False, Backend",
    ),
    "acceptance of an earlier route": (
        route(parent(condition("Accepted", "True", observedGeneration=1)), generation=2),
        "RoutePending", "infra/edge",
    ),
    "a refusal of an earlier route": (
        route(parent(condition("Accepted", "False", observedGeneration=1)), generation=2),
        "RoutePending", "infra/edge",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason", "text"), CASES.values(), ids=CASES.keys())
def test_conditions_of_a_route(given: Object, reason: str | None, text: str) -> None:
    found = diagnose_route(given)
    assert (found.reason if found else None) == reason
    assert found is None or text in found.message


def gateway_ready(given: Object, ready: bool = True) -> tuple[Any, Any]:
    group = ReportedGroup(
        role="gateway", desired=1, pods=[pod("g", ready=ready)], route=diagnose_route(given)
    )
    status = report(observed(), resolved(), {"gateway": group}, problem=None, now=NOW)
    (found,) = [each for each in status.conditions or [] if each.type == "GatewayReady"]
    return found, [each.reason for each in new_failures(service(), status)]


def test_a_gateway_with_a_refused_route_is_not_ready() -> None:
    found, events = gateway_ready(route(parent(REFUSED)))
    assert (found.status, found.reason) == ("False", "RouteNotAccepted")
    assert "1 of 1 gateway pods are ready" in found.message
    assert events == ["RouteNotAccepted"]


def test_a_pending_route_is_no_failure() -> None:
    found, events = gateway_ready(route())
    assert (found.status, found.reason, events) == ("False", "RoutePending", [])


def test_unready_pods_take_precedence_over_the_route() -> None:
    assert gateway_ready(route(parent(REFUSED)), ready=False)[0].reason == "Starting"
    assert gateway_ready(route(parent(ACCEPTED)))[0].status == "True"
