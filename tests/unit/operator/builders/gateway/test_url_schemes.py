"""The URL schemes of the gateway before, during and after a switch to TLS."""

from __future__ import annotations

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.builders.gateway import (
    gateway_service,
    http_route,
    ingress,
    url_schemes,
)
from baton_operator.observe.observation import gateway_schemes
from baton_protocol.options.config import GatewayConfig
from support.operator.gateway_pods import mounted, pod_template
from support.operator.services import decoded_config, resolved

TLS = {"tls": {"secretName": "cert"}}


def test_tls_changes_the_port_of_clients_and_the_service() -> None:
    template = pod_template(**TLS)
    assert (
        decoded_config("gateway", GatewayConfig, gateway=TLS).access.tls_dir
        == mounted(template)["cert"]
    )
    for spec, scheme, port in ((TLS, "https", 443), ({}, "http", 80)):
        (container,) = pod_template(**spec)["spec"]["containers"]
        assert [port["name"] for port in container["ports"]] == [scheme, "metrics"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTP"
            assert container[probe]["httpGet"]["port"] == "metrics"
        (found,) = gateway_service.build(resolved(gateway=spec))["spec"]["ports"]
        assert (found["name"], found["port"], found["targetPort"]) == (
            scheme,
            port,
            container["ports"][0]["name"],
        )
        built = ingress.build(resolved(gateway={**spec, "ingress": {"host": "h"}}))
        backend = built["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"] == {"name": scheme}
        route = http_route.build(
            resolved(gateway={**spec, "httpRoute": {"parentRefs": [{"name": "g"}]}})
        )
        assert route["spec"]["rules"][0]["backendRefs"][0]["port"] == port


@pytest.mark.parametrize(
    ("ready", "ports", "in_use"),
    [
        ([], ["https"], "https"),
        ([{}], ["http", "https"], "http"),
        ([{}, TLS], ["http", "https"], "https"),
        ([TLS], ["https"], "https"),
    ],
)
def test_during_the_switch_to_tls_each_port_selects_matching_pods(
    ready: list[Object], ports: list[str], in_use: str
) -> None:
    pods = []
    for spec in ready:
        pods.append(pod_template(**spec))
        pods[-1]["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    leaving = pod_template()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    leaving["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    schemes = gateway_schemes([*pods, leaving, pod_template(**TLS)])
    access_settings = {
        **TLS,
        "ingress": {"host": "h"},
        "httpRoute": {"parentRefs": [{"name": "g"}]},
    }
    service = msgspec.structs.replace(resolved(gateway=access_settings), gateway_schemes=schemes)
    assert [port["name"] for port in gateway_service.build(service)["spec"]["ports"]] == ports
    built, route = ingress.build(service), http_route.build(service)
    (path,) = built["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["port"] == {"name": in_use}
    assert (
        route["spec"]["rules"][0]["backendRefs"][0]["port"]
        == url_schemes.PORTS[url_schemes.scheme_in_use(service)]
    )
    assert url_schemes.scheme_in_use(service) == in_use
