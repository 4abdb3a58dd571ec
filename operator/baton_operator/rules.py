"""What can never work although every field by itself is right: one list, told to the API server and to the operator.

Each rule is written twice: in CEL for the CRD's schema, where the API server refuses what breaks it, and in Python for the
operator, which says InvalidSpec where the API server knows no CEL (before Kubernetes 1.25) or the object is older than the rule.
A test holds the two to the same verdict over random specs.

No rule compares with the old object: every edit has a way. Pods of a new revision replace those of the old one; an expert group
that becomes another one (another model, or independent engines) is scaled to nothing and formed anew (`plan_expert_group`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from baton_operator.api import Spec, decode_spec
from baton_operator.api_access import Gateway
from baton_operator.api_groups import AutoscalingBounds, DecodeAutoscaling, DecodeParallelism
from baton_operator.api_model import Model, is_fetched


class Rule(msgspec.Struct, frozen=True):
    """A condition on the value at `path` in the spec; where there is no value it holds."""

    path: str
    """Fields as in the API, joined by dots. Empty: the spec itself."""
    cel: str
    """`self` is the value."""
    message: str
    """What is wrong, in terms of fields below `path`."""
    holds: Callable[[Any], bool]
    """Of the struct at `path`."""


def _hands_to_whole_workers(spec: Spec) -> bool:
    return spec.prefill is None or spec.decode.parallelism.pipeline == 1


def _group_on_gpus_has_blocks(spec: Spec) -> bool:
    return not spec.decode.parallelism.expert or spec.engine.device != "cuda" or spec.engine.num_blocks is not None


def _rounds_on_cpus_only(spec: Spec) -> bool:
    return spec.model.quantization is None or spec.engine.device != "cuda"


def _cache_is_for_what_is_fetched(model: Model) -> bool:
    return is_fetched(model.uri) or (model.cache is None and model.credentials_secret is None)


def _never_leads_upwards(model: Model) -> bool:
    return ".." not in model.uri.split("/")


def _leaves_mounts_of_pods_alone(model: Model) -> bool:
    scheme, _, path = model.uri.partition("://")
    if scheme != "file":
        return True
    match [part for part in path.split("/") if part not in ("", ".")]:
        case [] | ["tmp"] | ["etc"] | ["etc", "baton" | "baton-api-keys" | "baton-tls", *_]:
            return False
    return True


def _one_cache(model: Model) -> bool:
    return model.cache is None or model.cache.host_path is None or model.cache.claim is None


def _ranks_have_all_layers(parallelism: DecodeParallelism) -> bool:
    return not parallelism.expert or parallelism.pipeline == 1


def _copies_are_of_a_group(parallelism: DecodeParallelism) -> bool:
    return parallelism.expert or parallelism.redundant_experts == 0


def _one_way_in(gateway: Gateway) -> bool:
    return gateway.ingress is None or gateway.http_route is None


def _limited_keys_exist(gateway: Gateway) -> bool:
    return gateway.limits.max_concurrent_per_key is None or gateway.api_keys is not None


def _certificate_is_no_key(gateway: Gateway) -> bool:
    keys, ingress_tls = gateway.api_keys, gateway.ingress.tls if gateway.ingress else None
    return keys is None or all(tls is None or tls.secret_name != keys.secret_name for tls in (gateway.tls, ingress_tls))


def _bounds_are_ordered(autoscaling: AutoscalingBounds) -> bool:
    return autoscaling.min_replicas <= autoscaling.max_replicas


def _idles_to_zero(autoscaling: AutoscalingBounds) -> bool:
    return (autoscaling.idle_seconds is not None) == (autoscaling.min_replicas == 0)


def _holds_for_zero(autoscaling: DecodeAutoscaling) -> bool:
    return autoscaling.hold_seconds is None or autoscaling.min_replicas == 0


RULES = (
    Rule(
        "",
        "!has(self.prefill) || self.decode.parallelism.pipeline == 1",
        "decode.parallelism.pipeline must be 1 with prefill: KV blocks are moved only to workers that have all layers",
        _hands_to_whole_workers,
    ),
    Rule(
        "",
        "!self.decode.parallelism.expert || !has(self.engine.device) || self.engine.device != 'cuda' || has(self.engine.numBlocks)",
        "engine.numBlocks is needed with decode.parallelism.expert on device cuda: what experts leave of a GPU depends on the "
        "group's size",
        _group_on_gpus_has_blocks,
    ),
    Rule(
        "",
        "!has(self.model.quantization) || !has(self.engine.device) || self.engine.device != 'cuda'",
        "model.quantization is for CPUs, and engine.device is cuda: leave out one of them",
        _rounds_on_cpus_only,
    ),
    Rule(
        "model",
        "(!has(self.cache) && !has(self.credentialsSecret)) || self.uri.matches('^(hf|s3|gs)://')",
        "cache and credentialsSecret are for a uri of hf, s3 or gs: nothing else is fetched",
        _cache_is_for_what_is_fetched,
    ),
    Rule(
        "model",
        "!self.uri.matches('/[.][.](/|$)')",
        "uri must not have .. in its path",
        _never_leads_upwards,
    ),
    Rule(
        "model",
        "!self.uri.matches('^file:/(/[.]?)*/([.]|tmp|etc(/([.]?/)*baton(-api-keys|-tls)?(/.*)?)?)?(/[.]?)*$')",
        "uri must not be /, /tmp, /etc, /etc/baton, /etc/baton-api-keys, /etc/baton-tls or in one of the last three: a folder of "
        "the node is mounted at its own path, and pods have folders of their own there",
        _leaves_mounts_of_pods_alone,
    ),
    Rule(
        "model",
        "!has(self.cache) || !has(self.cache.hostPath) || !has(self.cache.claim)",
        "cache.hostPath and cache.claim exclude each other",
        _one_cache,
    ),
    Rule(
        "decode.parallelism",
        "!self.expert || self.pipeline == 1",
        "pipeline must be 1 with expert: ranks of an expert group have all layers (tensor may be more)",
        _ranks_have_all_layers,
    ),
    Rule(
        "decode.parallelism",
        "self.expert || self.redundantExperts == 0",
        "redundantExperts needs expert: engines of their own have one of each expert",
        _copies_are_of_a_group,
    ),
    Rule(
        "gateway",
        "!has(self.ingress) || !has(self.httpRoute)",
        "ingress and httpRoute exclude each other: two ways in would be two endpoints",
        _one_way_in,
    ),
    Rule(
        "gateway",
        "!has(self.limits.maxConcurrentPerKey) || has(self.apiKeys)",
        "limits.maxConcurrentPerKey needs apiKeys: without keys nobody is told apart",
        _limited_keys_exist,
    ),
    Rule(
        "gateway",
        "!has(self.apiKeys) || ((!has(self.tls) || self.tls.secretName != self.apiKeys.secretName) && "
        "(!has(self.ingress) || !has(self.ingress.tls) || self.ingress.tls.secretName != self.apiKeys.secretName))",
        "apiKeys.secretName must not be the Secret of a certificate: each of its entries would be a key",
        _certificate_is_no_key,
    ),
    *(
        Rule(path, cel, message, holds)
        for path in ("prefill.autoscaling", "decode.autoscaling")
        for cel, message, holds in (
            (
                "self.minReplicas <= self.maxReplicas",
                "minReplicas must not be greater than maxReplicas",
                _bounds_are_ordered,
            ),
            (
                "has(self.idleSeconds) == (self.minReplicas == 0)",
                "idleSeconds belongs to minReplicas 0: set both, or neither",
                _idles_to_zero,
            ),
        )
    ),
    Rule(
        "decode.autoscaling",
        "!has(self.holdSeconds) || self.minReplicas == 0",
        "holdSeconds is of use with minReplicas 0 only",
        _holds_for_zero,
    ),
)


def violations(spec: Spec) -> list[str]:
    """What is wrong with `spec`, each beginning with the path of what holds the fields; empty if nothing is."""
    broken = []
    for rule in RULES:
        value = _at(spec, rule.path)
        if value is not None and not rule.holds(value):
            broken.append(f"{rule.path}: {rule.message}" if rule.path else rule.message)
    return broken


def valid_spec(spec: Any) -> Spec:
    """Return the typed form of `.spec`, if all its fields and the rules between them hold.

    Raises:
        ValueError: naming the field and what is wrong with it.
    """
    decoded = decode_spec(spec)
    if broken := violations(decoded):
        raise ValueError("; ".join(broken))
    return decoded


def add_rules(spec_schema: dict[str, Any]) -> None:
    """Writes the rules into the schema of the spec, each where its path leads."""
    for rule in RULES:
        node = spec_schema
        for name in filter(None, rule.path.split(".")):
            node = node["properties"][name]
        node.setdefault("x-kubernetes-validations", []).append({"rule": rule.cel, "message": rule.message})


def _at(spec: Spec, path: str) -> Any:
    value: Any = spec
    for name in filter(None, path.split(".")):
        value = None if value is None else getattr(value, re.sub("([A-Z])", r"_\1", name).lower())
    return value
