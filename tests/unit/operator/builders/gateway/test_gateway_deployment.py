"""Gateway pods: the Secrets that they read, their settings, and stable templates."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator.builders.gateway import (
    gateway_deployment,
)
from baton_operator.builders.member_pods import MemberTemplate
from baton_protocol.options.config import GatewayConfig
from pocketkube.apiserver.objects import server_side_apply
from pocketkube.apiserver.objects.server_side_apply import Manager
from pocketkube.apiserver.schema.merge_strategy import BuiltinFieldTypes
from support.operator.gateway_pods import mounted, pod_template
from support.operator.services import decoded_config, resolved

KEYS = {"apiKeys": {"secretName": "clients"}}


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
