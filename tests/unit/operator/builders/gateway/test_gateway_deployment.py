"""Gateway pods: the Secrets that they read, and the ports that Service, Ingress and route use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.builders.gateway import (
    gateway_deployment,
    gateway_service,
    http_route,
    ingress,
    url_schemes,
)
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.observe.observation import gateway_schemes
from baton_protocol.options.config import GatewayConfig
from pocketkube.apiserver.objects import server_side_apply
from pocketkube.apiserver.objects.server_side_apply import Manager
from pocketkube.apiserver.schema.merge_strategy import BuiltinFieldTypes
from support.operator.services import decoded_config, resolved

TLS = {"tls": {"secretName": "cert"}}
KEYS = {"apiKeys": {"secretName": "clients"}}


def mounted(pod: Object) -> dict[str, str]:
    """Return the mount path of each Secret in the first container."""
    paths = {
        mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]
    }
    return {
        v["secret"]["secretName"]: paths[v["name"]] for v in pod["spec"]["volumes"] if "secret" in v
    }


def pod_template(**spec: Any) -> Object:
    template: Object = gateway_deployment.build(resolved(gateway=spec))["spec"]["template"]
    return template


def test_the_gateway_reads_api_keys_from_their_mounted_secret() -> None:
    secrets = mounted(pod_template(**KEYS))
    limits = {"maxConcurrentPerKey": 3, "maxPromptTokens": 4, "maxCompletionTokens": 5}
    got = decoded_config("gateway", GatewayConfig, gateway={**KEYS, "limits": limits}).access
    assert got.api_keys_dir == secrets["clients"]
    assert (got.max_concurrent_per_client, got.max_prompt_tokens, got.max_completion_tokens) == (
        3,
        4,
        5,
    )
    assert (got.cache_sharing, got.shared_cache_salts) == ("key", ())
    assert "clients" not in mounted(pod_template())
    assert decoded_config("gateway", GatewayConfig).access.api_keys_dir == ""
    assert "clients" not in mounted(MemberTemplate(resolved(gateway=KEYS), "decode").pod(0)), (
        "API keys in the configuration of an engine"
    )


def test_a_scale_to_zero_by_hand_replaces_no_gateway() -> None:
    asleep, awake = (
        gateway_deployment.build(resolved(decode={"replicas": size})) for size in (0, 1)
    )
    assert asleep == awake


def test_the_gateway_gets_the_allowed_origins() -> None:
    origins = ["https://chat.example.com", "http://localhost:3000"]
    got = decoded_config("gateway", GatewayConfig, gateway={"cors": {"allowedOrigins": origins}})
    assert got.access.allowed_origins == tuple(origins)


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


def test_undoing_an_edit_of_the_model_uri_restores_the_first_template() -> None:
    """Otherwise the Deployment would replace the pods of the first ReplicaSet."""
    types, manager = BuiltinFieldTypes("Deployment"), Manager("baton-operator", "Apply", "apps/v1")

    def apply(live: Object | None, uri: str) -> Object:
        wanted = gateway_deployment.build(resolved(model={"uri": uri}))
        empty = {"metadata": {"name": wanted["metadata"]["name"]}}
        merged, owned = server_side_apply.apply(live or empty, wanted, manager, types, True)
        server_side_apply.track(live, merged, manager, owned, types, "2026-01-01T00:00:00Z")
        return merged

    first = apply(None, "file:///models/x")
    edited = apply(first, "file:///nope")
    assert edited["spec"] != first["spec"]
    assert apply(edited, "file:///models/x")["spec"] == first["spec"]
