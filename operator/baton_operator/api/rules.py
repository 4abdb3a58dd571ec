"""Validation rules between fields of the spec, for the API server and the operator.

Each rule is written in CEL and in Python. The CEL rule is part of the CRD's schema, so the API
server refuses specs that break the rule. The operator evaluates the Python rule and reports
InvalidSpec. The Python rule is needed because API servers before Kubernetes 1.25 do not evaluate
CEL, and because an object may be older than a rule.

No rule compares a spec with the previous spec, because every edit can be rolled out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from baton_operator.api.llmservice import Spec, decode_spec, value_at
from baton_operator.api.spec_access import Gateway
from baton_operator.api.spec_engine import Engine, merged
from baton_operator.api.spec_model import MODEL_URI, needs_download


class Rule(msgspec.Struct, frozen=True):
    """A condition on the value at `path` in the spec. A spec without this value meets the rule."""

    path: str  #: Field names of the API, joined by dots. Empty: the whole spec.
    message: str  #: The error message. Field names in it are relative to `path`.
    cel: str  #: The condition in CEL. `self` is the value.
    holds: Callable[[Any], bool]  #: The condition in Python. The argument is the struct at `path`.


def _is_free_folder(uri: str) -> bool:
    """Return whether a pod can mount the folder of a `file` URI at the path in the URI.

    The result is False for a path that pods use for another purpose, such as /tmp. It is True for
    all other paths, and for URIs with another scheme.
    """
    scheme, _, path = uri.partition("://")
    match [scheme, *(part for part in path.split("/") if part not in ("", "."))]:
        case (
            ["file"]
            | ["file", "tmp" | "etc"]
            | ["file", "etc", "baton" | "baton-api-keys" | "baton-tls", *_]
        ):
            return False
    return True


def _is_no_certificate(gateway: Gateway) -> bool:
    keys = gateway.api_keys
    certificates = gateway.tls, gateway.ingress.tls if gateway.ingress else None
    return keys is None or all(
        tls is None or tls.secret_name != keys.secret_name for tls in certificates
    )


def _prefill(spec: Spec) -> Engine:
    """Return the engine options of the prefill pods."""
    return merged(spec.engine, spec.prefill.engine if spec.prefill else None)


def _decode(spec: Spec) -> Engine:
    """Return the engine options of the decode pods."""
    return merged(spec.engine, spec.decode.engine)


def _tuned(role: str, field: str, default: str) -> str:
    """Return the CEL expression for the value of an engine field in the pods of `role`.

    Args:
        role: `prefill` or `decode`. `spec.prefill.engine` or `spec.decode.engine` overrides
            `spec.engine`.
        field: name of the field in the API.
        default: the CEL expression for the value if the field is unset in both places.
    """
    own, shared = f"self.{role}.engine", "self.engine"
    return (
        f"(has({own}) && has({own}.{field}) ? {own}.{field} : "
        f"has({shared}.{field}) ? {shared}.{field} : {default})"
    )


_AUTO = "'auto'"
_PREFILL_DEVICE = _tuned("prefill", "device", _AUTO)
_DECODE_DEVICE = _tuned("decode", "device", _AUTO)

RULES = (
    Rule(
        "",
        "decode.parallelism.pipeline must be 1 with prefill: KV blocks are moved only to workers "
        "that have all layers",
        "!has(self.prefill) || self.decode.parallelism.pipeline == 1",
        lambda spec: spec.prefill is None or spec.decode.parallelism.pipeline == 1,
    ),
    Rule(
        "",
        "engine.numBlocks is required with decode.parallelism.expert on device cuda: the memory "
        "that experts leave on a GPU depends on the group's size",
        f"!self.decode.parallelism.expert || {_DECODE_DEVICE} != 'cuda' || "
        f"{_tuned('decode', 'numBlocks', '0')} != 0",
        lambda spec: (
            not spec.decode.parallelism.expert
            or _decode(spec).device != "cuda"
            or _decode(spec).num_blocks is not None
        ),
    ),
    Rule(
        "",
        "engine.asyncScheduling must not be true with decode.parallelism.expert: ranks agree on "
        "every step before it is scheduled",
        f"!self.decode.parallelism.expert || !{_tuned('decode', 'asyncScheduling', 'false')}",
        lambda spec: not spec.decode.parallelism.expert or not _decode(spec).async_scheduling,
    ),
    Rule(
        "",
        "engine.compilationMode and engine.cudagraphMode must be auto or none with "
        "decode.parallelism.expert: exchanges with other ranks are neither compiled nor captured",
        f"!self.decode.parallelism.expert || {_tuned('decode', 'enforceEager', 'false')} || "
        f"({_tuned('decode', 'compilationMode', _AUTO)} in ['auto', 'none'] && "
        f"{_tuned('decode', 'cudagraphMode', _AUTO)} in ['auto', 'none'])",
        lambda spec: (
            not spec.decode.parallelism.expert
            or _decode(spec).enforce_eager is True
            or {_decode(spec).compilation_mode, _decode(spec).cudagraph_mode}
            <= {None, "auto", "none"}
        ),
    ),
    Rule(
        "",
        "engine.blockSize must be the same for prefill and decode: they exchange KV blocks",
        f"!has(self.prefill) || {_tuned('prefill', 'blockSize', '16')} == "
        f"{_tuned('decode', 'blockSize', '16')}",
        lambda spec: (
            spec.prefill is None
            or (_prefill(spec).block_size or 16) == (_decode(spec).block_size or 16)
        ),
    ),
    Rule(
        "",
        "model.quantization is for CPUs, and engine.device is cuda: leave out one of them",
        f"!has(self.model.quantization) || ({_DECODE_DEVICE} != 'cuda' && "
        f"(!has(self.prefill) || {_PREFILL_DEVICE} != 'cuda'))",
        lambda spec: (
            spec.model.quantization is None
            or (
                _decode(spec).device != "cuda"
                and (spec.prefill is None or _prefill(spec).device != "cuda")
            )
        ),
    ),
    Rule(
        "",
        "model.runner is pooling, and a pooling model ends with its prompt: leave out prefill and "
        "decode.parallelism.expert",
        "!has(self.model.runner) || self.model.runner != 'pooling' || "
        "(!has(self.prefill) && !self.decode.parallelism.expert)",
        lambda spec: (
            spec.model.runner != "pooling"
            or (spec.prefill is None and not spec.decode.parallelism.expert)
        ),
    ),
    Rule(
        "",
        "kvTransfer.rdma needs transport ucx or auto: tcp and shm do not use RDMA, and nixl "
        "chooses its own devices",
        "!self.kvTransfer.rdma || self.kvTransfer.transport in ['ucx', 'auto']",
        lambda spec: not spec.kv_transfer.rdma or spec.kv_transfer.transport in ("ucx", "auto"),
    ),
    Rule(
        "model",
        "uri must be file:///DIR, pvc://CLAIM/DIR, hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX or image://REFERENCE[/DIR], whose REFERENCE has a tag or a digest",
        f"self.uri.matches('{MODEL_URI}')",
        lambda model: re.fullmatch(MODEL_URI, model.uri) is not None,
    ),
    Rule(
        "model",
        "cache and credentialsSecret need a uri of hf, s3 or gs: other models are not downloaded",
        "(!has(self.cache) && !has(self.credentialsSecret)) || self.uri.matches('^(hf|s3|gs)://')",
        lambda model: (
            (model.cache is None and model.credentials_secret is None) or needs_download(model.uri)
        ),
    ),
    Rule(
        "model",
        "uri must not have .. in its path",
        "!self.uri.matches('/[.][.](/|$)')",
        lambda model: ".." not in model.uri.split("/"),
    ),
    Rule(
        "model",
        "uri must not be /, /tmp, /etc, /etc/baton, /etc/baton-api-keys, /etc/baton-tls or in one "
        "of the last three: a folder of the node is mounted at its own path, and pods have folders "
        "of their own there",
        "!self.uri.matches('^file:/(/[.]?)*/([.]|tmp|etc(/([.]?/)*baton(-api-keys|-tls)?(/.*)?)?)?"
        "(/[.]?)*$')",
        lambda model: _is_free_folder(model.uri),
    ),
    Rule(
        "model",
        "cache.hostPath and cache.claim exclude each other",
        "!has(self.cache) || !has(self.cache.hostPath) || !has(self.cache.claim)",
        lambda model: (
            model.cache is None or model.cache.host_path is None or model.cache.claim is None
        ),
    ),
    *(
        Rule(
            path,
            "each of compileCache and diagnostics needs either hostPath or claim",
            "(!has(self.compileCache) || has(self.compileCache.hostPath) != "
            "has(self.compileCache.claim)) && (!has(self.diagnostics) || "
            "has(self.diagnostics.hostPath) != has(self.diagnostics.claim))",
            lambda engine: all(
                storage is None or (storage.host_path is None) != (storage.claim is None)
                for storage in (engine.compile_cache, engine.diagnostics)
            ),
        )
        for path in ("engine", "prefill.engine", "decode.engine")
    ),
    Rule(
        "decode.parallelism",
        "pipeline must be 1 with expert: ranks of an expert group have all layers; tensor may be "
        "more than 1",
        "!self.expert || self.pipeline == 1",
        lambda parallelism: not parallelism.expert or parallelism.pipeline == 1,
    ),
    Rule(
        "decode.parallelism",
        "redundantExperts needs expert: an independent engine has one of each expert",
        "self.expert || self.redundantExperts == 0",
        lambda parallelism: parallelism.expert or parallelism.redundant_experts == 0,
    ),
    Rule(
        "gateway",
        "ingress and httpRoute exclude each other: the status has one endpoint",
        "!has(self.ingress) || !has(self.httpRoute)",
        lambda gateway: gateway.ingress is None or gateway.http_route is None,
    ),
    Rule(
        "gateway",
        "limits.maxConcurrentPerKey needs apiKeys: without keys clients cannot be distinguished",
        "!has(self.limits.maxConcurrentPerKey) || has(self.apiKeys)",
        lambda gateway: (
            gateway.limits.max_concurrent_per_key is None or gateway.api_keys is not None
        ),
    ),
    Rule(
        "gateway",
        "apiKeys.secretName must not be the Secret of a certificate: each of its entries would be "
        "a key",
        "!has(self.apiKeys) || "
        "((!has(self.tls) || self.tls.secretName != self.apiKeys.secretName) && "
        "(!has(self.ingress) || !has(self.ingress.tls) || "
        "self.ingress.tls.secretName != self.apiKeys.secretName))",
        _is_no_certificate,
    ),
    *(
        rule
        for path in ("prefill.autoscaling", "decode.autoscaling")
        for rule in (
            Rule(
                path,
                "minReplicas must not be greater than maxReplicas",
                "self.minReplicas <= self.maxReplicas",
                lambda autoscaling: autoscaling.min_replicas <= autoscaling.max_replicas,
            ),
            Rule(
                path,
                "idleSeconds belongs to minReplicas 0: set both, or neither",
                "has(self.idleSeconds) == (self.minReplicas == 0)",
                lambda autoscaling: (
                    (autoscaling.idle_seconds is not None) == (autoscaling.min_replicas == 0)
                ),
            ),
        )
    ),
    Rule(
        "decode.autoscaling",
        "holdSeconds applies only with minReplicas 0",
        "!has(self.holdSeconds) || self.minReplicas == 0",
        lambda autoscaling: autoscaling.hold_seconds is None or autoscaling.min_replicas == 0,
    ),
)


def violations(spec: Spec) -> list[str]:
    """Return an error message for each rule that `spec` breaks. It begins with the rule's path."""
    broken = []
    for rule in RULES:
        value = value_at(spec, rule.path)
        if value is not None and not rule.holds(value):
            broken.append(f"{rule.path}: {rule.message}" if rule.path else rule.message)
    return broken


def valid_spec(spec: Any) -> Spec:
    """Convert `.spec` of an object to a `Spec`, and check all rules.

    Raises:
        ValueError: a field does not match the schema, or a rule is broken. The message names the
            field.
    """
    decoded = decode_spec(spec)
    if broken := violations(decoded):
        raise ValueError("; ".join(broken))
    return decoded


def add_rules(spec_schema: dict[str, Any]) -> None:
    """Add the CEL form of every rule in `RULES` to the schema of the spec, at the rule's path."""
    for rule in RULES:
        node = spec_schema
        for name in filter(None, rule.path.split(".")):
            node = node["properties"][name]
        node.setdefault("x-kubernetes-validations", []).append(
            {"rule": rule.cel, "message": rule.message}
        )
