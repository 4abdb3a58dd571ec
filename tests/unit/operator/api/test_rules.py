"""The rules of the spec: CEL and Python agree on every spec."""

from __future__ import annotations

import copy
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kube.client import Object
from baton_operator.api.crd import custom_resource_definition
from baton_operator.api.llmservice import MAX_SPEC_BYTES, MAX_SPEC_DEPTH, decode_spec
from baton_operator.api.rules import RULES, violations
from pocketkube.apiserver.schema.structural import StructuralSchema

ROOT = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SCHEMA = StructuralSchema(ROOT)
TEXTS = (
    *("a", "b", "25%", "512Mi", "IfNotPresent", "oci://r/m"),
    *("file:///m", "pvc://c/m", "hf://o/m", "s3://b/m", "file:///tmp", "pvc://c/../m"),
    "https://a.example",
)


def stored(spec: Object) -> Object:
    """Return the service as the API server stores it."""
    document: Object = {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "demo"},
    }
    return SCHEMA.default(document | {"spec": copy.deepcopy(spec)})


def refused(spec: Object) -> set[str]:
    """Return the errors of the API server as `path: message`, with the path below spec."""
    errors = set()
    for error in SCHEMA.validate(stored(spec), None):
        match = re.fullmatch(r'Invalid value: "object": (.*)', error.message, re.DOTALL)
        assert match, f"{error.field}: {error.message}"
        path = error.field.removeprefix("spec").removeprefix(".")
        errors.add(f"{path}: {match[1]}" if path else match[1])
    return errors


def values(schema: Object) -> st.SearchStrategy[Any]:
    """Draw values that are valid without the rules. Numbers are near their bounds."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.just({"a": "b"} if schema.get("minProperties") else {})
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.integers(0, 2)
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "integer":
            low = schema["minimum"]
            return st.integers(low, min(low + 2, schema["maximum"]))
        case "string":
            fitting = [text for text in TEXTS if re.search(schema.get("pattern", ""), text)]
            return st.sampled_from(fitting) if fitting else st.from_regex(schema["pattern"])
        case "array":
            low = schema.get("minItems", 0)
            return st.lists(values(schema["items"]), min_size=low, max_size=low + 1, unique_by=repr)
        case "object" if "properties" in schema:
            required = set(schema.get("required", ()))
            fields = {name: values(below) for name, below in schema["properties"].items()}
            return st.fixed_dictionaries(
                {name: field for name, field in fields.items() if name in required},
                optional={name: field for name, field in fields.items() if name not in required},
            )
        case "object":
            return st.just({})
    raise AssertionError(schema)


@settings(max_examples=100, deadline=None)
@given(values(ROOT["properties"]["spec"]))
def test_the_schema_and_the_operator_agree_on_any_spec(spec: Object) -> None:
    assert set(violations(decode_spec(stored(spec)["spec"]))) == refused(spec)


def nested(path: str, value: Object) -> Object:
    """Return a spec with `value` at `path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


M = {"model": {"uri": "file:///m"}}
GATEWAY_TLS = {"tls": {"secretName": "s"}}
BROKEN: list[tuple[str, Object]] = [
    (
        "decode.parallelism.pipeline must be 1 with prefill",
        {"prefill": {}, "decode": {"parallelism": {"pipeline": 2}}},
    ),
    (
        "engine.numBlocks is required",
        {"decode": {"parallelism": {"expert": True}}, "engine": {"device": "cuda"}},
    ),
    (
        "kvTransfer.rdma needs transport ucx or auto",
        {"kvTransfer": {"rdma": True, "transport": "tcp"}},
    ),
    ("model.runner is pooling", {"model": {**M["model"], "runner": "pooling"}, "prefill": {}}),
    (
        "model.runner is pooling",
        {
            "model": {**M["model"], "runner": "pooling"},
            "decode": {"parallelism": {"expert": True}},
        },
    ),
    (
        "model.quantization is for CPUs",
        {"model": {**M["model"], "quantization": "int8"}, "engine": {"device": "cuda"}},
    ),
    (
        "model.quantization is for CPUs",
        {
            "model": {**M["model"], "quantization": "int8"},
            "prefill": {"engine": {"device": "cuda"}},
            "engine": {"device": "cpu"},
        },
    ),
    (
        "engine.numBlocks is required",
        {
            "decode": {"parallelism": {"expert": True}, "engine": {"device": "cuda"}},
            "prefill": {"engine": {"numBlocks": 9}},
        },
    ),
    (
        "engine.asyncScheduling must not be true",
        {"decode": {"parallelism": {"expert": True}, "engine": {"asyncScheduling": True}}},
    ),
    (
        "engine.compilationMode and engine.cudagraphMode must be auto or none",
        {"decode": {"parallelism": {"expert": True}}, "engine": {"cudagraphMode": "full"}},
    ),
    (
        "engine.compilationMode and engine.cudagraphMode must be auto or none",
        {"decode": {"parallelism": {"expert": True}}, "engine": {"compilationMode": "inductor"}},
    ),
    (
        "engine.blockSize must be the same",
        {"prefill": {"engine": {"blockSize": 32}}, "decode": {"engine": {"blockSize": 8}}},
    ),
    ("engine.blockSize must be the same", {"prefill": {}, "decode": {"engine": {"blockSize": 32}}}),
    *(
        (f"{path}: each of compileCache and diagnostics needs", nested(path, engine))
        for path in ("engine", "prefill.engine", "decode.engine")
        for engine in ({"compileCache": {}}, {"diagnostics": {"hostPath": "/d", "claim": "d"}})
    ),
    ("uri must be file:///DIR, pvc://", {"model": {"uri": "ftp://host/m"}}),
    ("uri must be file:///DIR, pvc://", {"model": {"uri": "file://models/m"}}),
    ("uri must not have ..", {"model": {"uri": "pvc://c/../m"}}),
    ("uri must not be /, /tmp,", {"model": {"uri": "file:///tmp"}}),
    ("cache and credentialsSecret need", {"model": {**M["model"], "credentialsSecret": "s"}}),
    ("cache and credentialsSecret need", {"model": {**M["model"], "cache": {"claim": "c"}}}),
    (
        "exclude each other",
        {"model": {"uri": "hf://o/m", "cache": {"claim": "c", "hostPath": "/c"}}},
    ),
    (
        "pipeline must be 1 with expert",
        {"decode": {"parallelism": {"expert": True, "pipeline": 2}}},
    ),
    ("redundantExperts needs expert", {"decode": {"parallelism": {"redundantExperts": 1}}}),
    (
        "ingress and httpRoute exclude each other",
        {"gateway": {"ingress": {"host": "h"}, "httpRoute": {"parentRefs": [{"name": "g"}]}}},
    ),
    (
        "limits.maxConcurrentPerKey needs apiKeys",
        {"gateway": {"limits": {"maxConcurrentPerKey": 1}}},
    ),
    (
        "apiKeys.secretName must not be",
        {"gateway": {"apiKeys": {"secretName": "s"}, **GATEWAY_TLS}},
    ),
    (
        "apiKeys.secretName must not be",
        {"gateway": {"apiKeys": {"secretName": "s"}, "ingress": {"host": "h", **GATEWAY_TLS}}},
    ),
    (
        "minReplicas must not be greater",
        {"prefill": {"autoscaling": {"ttftMilliseconds": 1, "minReplicas": 2, "maxReplicas": 1}}},
    ),
    (
        "minReplicas must not be greater",
        {"decode": {"autoscaling": {"itlMilliseconds": 1, "minReplicas": 2, "maxReplicas": 1}}},
    ),
    (
        "idleSeconds belongs to",
        {"prefill": {"autoscaling": {"ttftMilliseconds": 1, "minReplicas": 0, "maxReplicas": 1}}},
    ),
    (
        "idleSeconds belongs to",
        {"decode": {"autoscaling": {"itlMilliseconds": 1, "idleSeconds": 1, "maxReplicas": 1}}},
    ),
    (
        "holdSeconds applies only",
        {"decode": {"autoscaling": {"itlMilliseconds": 1, "holdSeconds": 1, "maxReplicas": 1}}},
    ),
]


@pytest.mark.parametrize(("message", "spec"), BROKEN)
def test_invalid_specs_are_refused_with_a_message(message: str, spec: Object) -> None:
    spec = M | spec
    (found,) = violations(decode_spec(spec))
    assert message in found
    assert refused(spec) == {found}


def errors_of_origin(origin: str) -> list[str]:
    """Return the fields that the API server refuses. The operator agrees, and names the field."""
    spec = M | {"gateway": {"cors": {"allowedOrigins": ["*", origin]}}}
    fields = [error.field for error in SCHEMA.validate(stored(spec), None)]
    if fields:
        with pytest.raises(msgspec.ValidationError, match=r"gateway\.cors\.allowedOrigins"):
            decode_spec(spec)
    else:
        assert decode_spec(spec).gateway.cors.allowed_origins == ["*", origin]
    return fields


def test_large_and_deep_specs_are_refused() -> None:
    value: Object = {}
    for _ in range(MAX_SPEC_DEPTH):
        value = {"a": value}
    large = {"a": "x" * MAX_SPEC_BYTES}
    for template, message in ((large, "the spec has"), (value, "the spec is nested too deeply")):
        with pytest.raises(msgspec.ValidationError, match=message):
            decode_spec({"decode": {"template": template}})


def test_valid_and_invalid_origins() -> None:
    for origin in (
        *("https://chat.example.com", "http://localhost:3000", "http://127.0.0.1", "*"),
        *("http://[::1]:8080", "chrome-extension://abcdef", "https://xn--bcher-kva.example"),
    ):
        assert errors_of_origin(origin) == []
    for origin in (
        *("", "chat.example.com", "https://", "https://*.example.com", "https://a.example/"),
        *("https://a.example/x", "https://A.example", "https://a:b", "https://u@a", "null"),
    ):
        assert errors_of_origin(origin) == ["spec.gateway.cors.allowedOrigins[1]"], origin


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "file:///../../etc",
            "file:///m/..",
            "pvc://c/../../..",
            "pvc://c/a/../b",
            "s3://b/../m",
            "s3://b/m/..",
        ),
        *(
            "hf://o/m@a/../b",
            "image://r/a:v1/../x",
            "file:////",
            "file:///.",
            "file:///tmp",
            "file:////tmp/",
            "file:///./tmp/.",
        ),
        *(
            "file:///etc",
            "file:///etc/baton",
            "file:///etc//baton",
            "file:///etc/baton/m",
            "file:///etc/baton/service-key",
        ),
        *("file:///etc/baton-tls", "file:///etc/baton-api-keys/x"),
    ],
)
def test_an_invalid_uri_is_refused(uri: str) -> None:
    spec = {"model": {"uri": uri}}
    (found,) = violations(decode_spec(spec))
    assert found.startswith("model: uri must not")
    assert refused(spec) == {found}


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "file:///models",
            "file:///tmp/m",
            "file:///m/tmp",
            "file:///etc/models",
            "file:///etc/baton-models/m",
            "file:////m//x/",
        ),
        *(
            "file:///m/..x",
            "file:///m/...",
            "pvc://c/.",
            "pvc://c//",
            "pvc://c/tmp",
            "s3://b/a//b/",
            "gs://tmp/tmp",
            "hf://o/m@a..b",
        ),
    ],
)
def test_a_valid_uri_is_accepted(uri: str) -> None:
    assert not violations(decode_spec({"model": {"uri": uri}}))
    assert not refused({"model": {"uri": uri}})


PARTS = st.sampled_from(["", ".", "..", "tmp", "etc", "baton", "baton-tls", "baton-x", "m"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        ["file:///", "file://", "pvc://c/", "pvc:///", "s3://b/", "image://a/b:", "hf://"]
    ),
    st.lists(PARTS, min_size=1, max_size=5),
)
def test_the_schema_and_the_operator_agree_on_any_uri(root: str, parts: list[str]) -> None:
    uri = root + "/".join(parts)
    spec = {"model": {"uri": uri}}
    assert set(violations(decode_spec(spec))) == refused(spec)


def test_every_rule_is_broken_by_an_example() -> None:
    broken = {found for _, spec in BROKEN for found in violations(decode_spec(M | spec))}
    assert broken == {
        f"{rule.path}: {rule.message}" if rule.path else rule.message for rule in RULES
    }


def test_each_rule_is_placed_at_its_fields() -> None:
    def rules(node: Object, path: str) -> list[tuple[str, str]]:
        here = [(path, rule["rule"]) for rule in node.get("x-kubernetes-validations", ())]
        below = (
            rules(child, f"{path}.{name}" if path else name)
            for name, child in node.get("properties", {}).items()
        )
        return here + [rule for found in below for rule in found]

    assert sorted(rules(ROOT["properties"]["spec"], "")) == sorted(
        (rule.path, rule.cel) for rule in RULES
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {**M["model"], "runner": "pooling"}},
        {"model": {**M["model"], "runner": "generate"}, "prefill": {}},
        {
            "model": {**M["model"], "quantization": "int8"},
            "engine": {"device": "cuda"},
            "decode": {"engine": {"device": "cpu"}},
        },
        {
            "decode": {
                "parallelism": {"expert": True},
                "engine": {"device": "cuda", "numBlocks": 9, "enforceEager": True},
            },
            "engine": {"compilationMode": "inductor"},
        },
        {
            "decode": {"parallelism": {"expert": True}, "engine": {"asyncScheduling": False}},
            "engine": {"asyncScheduling": True},
        },
        {"prefill": {"engine": {"blockSize": 16}}, "decode": {}},
        {"engine": {"blockSize": 8}, "prefill": {}, "decode": {"engine": {"blockSize": 8}}},
    ],
)
def test_rules_check_the_options_of_a_role_after_its_overrides(spec: Object) -> None:
    assert not violations(decode_spec(M | spec))
    assert not refused(M | spec)
