"""The HTTPRoute of the gateway."""

from __future__ import annotations

from baton_operator.builders.gateway import gateway_service
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved


def test_a_route_is_built_if_the_cluster_has_the_kind() -> None:
    parents = [
        {"name": "public", "namespace": "infra", "sectionName": "https"},
        {"name": "inner", "port": 8443},
    ]
    service = resolved(gateway={"httpRoute": {"parentRefs": parents, "hostnames": ["h.example"]}})
    (route,) = [
        obj
        for obj in compute_desired(service, None, http_routes=True).objects
        if obj["kind"] == "HTTPRoute"
    ]
    assert route["spec"]["hostnames"] == ["h.example"]
    group = {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
    assert route["spec"]["parentRefs"] == [{**group, **parent} for parent in parents]
    assert (
        route["spec"]["rules"][0]["backendRefs"][0]["name"]
        == gateway_service.build(service)["metadata"]["name"]
    )
    unknown = compute_desired(service, None)
    assert "HTTPRoute" not in {obj["kind"] for obj in unknown.objects} | {
        kind for kind, _ in unknown.absent
    }
    assert ("HTTPRoute", "demo-gateway") in compute_desired(
        resolved(), None, http_routes=True
    ).absent
