"""Each field of `spec.gateway` reaches the gateway's configuration or an object of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from baton_gateway.cli import OPTIONS
from baton_kube.client import Object
from baton_operator.api.spec_access import Gateway
from baton_operator.builders.config_maps import API_KEYS_PATH, GATEWAY, TLS_PATH
from baton_operator.reconcile.desired import compute_desired
from baton_protocol.options.config import GatewayConfig
from support.operator.services import decoded_config, resolved

#: Field -> (value, the options that it sets).
CONFIGURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "tls": ({"secretName": "s"}, {"access.tls_dir": TLS_PATH}),
    "apiKeys": (
        {"secretName": "s", "cacheSharing": "service", "sharedCacheSalts": ["a"]},
        {
            "access.api_keys_dir": API_KEYS_PATH,
            "access.cache_sharing": "service",
            "access.shared_cache_salts": ("a",),
        },
    ),
    "cors.allowedOrigins": (["https://a.b"], {"access.allowed_origins": ("https://a.b",)}),
    "limits.maxConcurrentPerKey": (7, {"access.max_concurrent_per_client": 7}),
    "limits.minPriority": (-7, {"access.min_priority": -7}),
    "limits.maxPromptTokens": (7, {"access.max_prompt_tokens": 7}),
    "limits.maxCompletionTokens": (7, {"access.max_completion_tokens": 7}),
    "maxConcurrentRequests": (7, {"max_concurrent_requests": 7}),
    "generationConfig": ("none", {"generation_config": "none"}),
    "prefillThresholdTokens": (7, {"prefill_threshold_tokens": 7}),
    "queueTimeoutSeconds": (7, {"queue_wait_s": 7.0}),
    "resumeTimeoutSeconds": (7, {"resume_wait_s": 7.0}),
    "stallTimeoutSeconds": (7, {"stall_timeout_s": 7.0}),
    "interTokenTimeoutSeconds": (7, {"inter_token_timeout_s": 7.0}),
    "requestTimeoutSeconds": (7, {"request_timeout_s": 7.0}),
}
#: Field that is not for the process -> (value, kind of the object that it changes).
OF_KUBERNETES: dict[str, tuple[Any, str]] = {
    "replicas": (7, "Deployment"),
    "resources": ({"limits": {"cpu": "7"}}, "Deployment"),
    "template": ({"spec": {"priorityClassName": "p"}}, "Deployment"),
    "ingress": ({"host": "a.b"}, "Ingress"),
    "httpRoute": ({"parentRefs": [{"name": "g"}]}, "HTTPRoute"),
}


def fields(struct: type[msgspec.Struct], section: str = "") -> Iterator[str]:
    """Yield the paths of the fields."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from fields(field.type, f"{section}{field.encode_name}.")
        else:
            yield section + field.encode_name


def spec_with(field: str, value: Any) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    return {"gateway": value}


def changes(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the options that `spec` changes in the configuration that the gateway reads."""
    before: GatewayConfig = decoded_config("gateway", GatewayConfig)
    after: GatewayConfig = decoded_config("gateway", GatewayConfig, **spec)
    return {
        option.path: value
        for option in OPTIONS
        if (value := attrgetter(option.path)(after)) != attrgetter(option.path)(before)
    }


def objects(kind: str, **spec: Any) -> list[Object]:
    made = compute_desired(resolved(**spec), None, http_routes=True).objects
    return [each for each in made if each["kind"] == kind]


@pytest.mark.parametrize("field", list(fields(Gateway)))
def test_each_field_reaches_the_gateway(field: str) -> None:
    if field in OF_KUBERNETES:
        value, kind = OF_KUBERNETES[field]
        assert objects(kind, **spec_with(field, value)) != objects(kind)
        options = {}
    else:
        value, options = CONFIGURED[field]
    assert changes(spec_with(field, value)) == options


def test_fields_of_other_sections_reach_the_gateway() -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 9, "itlMilliseconds": 9}
    for spec, options in (
        ({"drainTimeoutSeconds": 7}, {"drain_timeout_s": 7.0}),
        ({"decode": {"autoscaling": autoscaling}}, {"hold_s": 300.0}),
        ({"decode": {"autoscaling": {**autoscaling, "holdSeconds": 7}}}, {"hold_s": 7.0}),
        ({"decode": {"autoscaling": {**autoscaling, "minReplicas": 1}}}, {}),
        ({"model": {"uri": "file:///m"}}, {"model.path": "/m"}),
        (
            {"model": {"uri": "file:///models/x", "servedName": "n"}},
            {"model.served_name": "n"},
        ),
        (
            {"model": {"uri": "file:///models/x", "toolParser": "hermes"}},
            {"tool_parser": "hermes"},
        ),
        (
            {"model": {"uri": "file:///models/x", "reasoningParser": "none"}},
            {"reasoning_parser": "none"},
        ),
    ):
        assert changes(spec) == options


def test_every_option_of_a_field_is_set_by_a_test() -> None:
    tested = {option for _, options in CONFIGURED.values() for option in options}
    assert {setting.option for setting in GATEWAY} == tested | {
        "hold_s",
        "drain_timeout_s",
        "tool_parser",
        "reasoning_parser",
    }
