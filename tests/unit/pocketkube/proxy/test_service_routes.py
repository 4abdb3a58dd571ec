"""Routes of the proxies: endpoints of a Service, and rules of an Ingress."""

import pytest

from pocketkube.proxy.service_routes import Backend, endpoints, match_route, routes
from support.pocketkube.proxied_objects import ingress, pod, service


def test_endpoints_are_ready_selected_pods_that_do_not_terminate() -> None:
    pods = [
        pod("a", "127.1.1.1"),
        pod("unready", "127.1.1.2", ready=False),
        pod("leaving", "127.1.1.3", deletionTimestamp="2026-01-01T00:00:00Z"),
        {
            **pod("other", "127.1.1.4"),
            "metadata": {"name": "other", "namespace": "ns", "labels": {"app": "db"}},
        },
        {
            **pod("far", "127.1.1.5"),
            "metadata": {"name": "far", "namespace": "elsewhere", "labels": {"app": "web"}},
        },
    ]
    port = service()["spec"]["ports"][0]
    assert endpoints(service(), port, pods) == [("127.1.1.1", 8000)]
    assert endpoints(service(publishNotReadyAddresses=True), port, pods) == [
        ("127.1.1.1", 8000),
        ("127.1.1.2", 8000),
    ]
    assert endpoints(service(selector={}), port, pods) == []
    assert endpoints(service(), {"port": 90}, pods) == [("127.1.1.1", 90)]


@pytest.mark.parametrize(
    ("host", "path", "name"),
    [
        ("web.test", "/v1/models", "api"),
        ("WEB.test", "/v1", "api"),
        ("web.test", "/v1x", "root"),
        ("web.test", "/v1/exact", "exact"),
        ("a.wild.test", "/", "wild"),
        ("a.b.wild.test", "/", None),
        ("unknown.test", "/", None),
    ],
)
def test_an_ingress_route_prefers_host_then_exact_then_longest_prefix(
    host: str, path: str, name: str | None
) -> None:
    rules = ingress(
        ("/", "Prefix", "root"), ("/v1", "Prefix", "api"), ("/v1/exact", "Exact", "exact")
    )
    table = routes([ingress(("/", "Prefix", "wild"), host="*.wild.test"), rules])
    assert match_route(table, host, path) == (Backend("ns", name, "web") if name else None)
