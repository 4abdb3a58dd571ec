"""The CRD: a structural schema with the structs' defaults, and its reference page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.worker.memory.block_budget import CPU_MEMORY_BYTES, SWAP_MEMORY_PERCENT
from baton_operator.api import llmservice
from baton_operator.api.crd import custom_resource_definition
from baton_operator.api.rules import RULES
from baton_operator.api.spec_groups import DEFAULT_HOLD_SECONDS
from baton_protocol.options.config import (
    CacheConfig,
    CompilationConfig,
    GatewayConfig,
    KVTransferConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)

MANIFESTS = Path(__file__).parents[4] / "manifests"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def test_every_node_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        if node.get("x-kubernetes-int-or-string"):
            continue
        assert node["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        assert not {"$ref", "anyOf", "oneOf"} & set(node), path
        assert not {"properties", "additionalProperties"} <= set(node), path


def test_every_field_is_described_in_its_struct() -> None:
    described = {root: SCHEMA["properties"][root] for root in ("spec", "status")}
    assert [
        root + path
        for root, node in described.items()
        for path, node in nodes(node)
        if not node.get("description")
    ] == []


def test_descriptions_name_the_defaults_of_engine_and_gateway() -> None:
    gateway = {field.name: field.default for field in msgspec.structs.fields(GatewayConfig)}
    cpu_memory = f"{CPU_MEMORY_BYTES // 2**20}Mi"
    cache, compilation, transfer = CacheConfig(), CompilationConfig(), KVTransferConfig()
    scheduler, observed = SchedulerConfig(), ObservabilityConfig()
    defaults = {
        "engine.blockSize": cache.block_size,
        "engine.kvCacheMemory": f"as much as fits on a GPU, and {cpu_memory} on a CPU",
        "engine.gpuMemoryUtilizationPercent": round(100 * cache.gpu_memory_utilization),
        "engine.swapMemory": f"{SWAP_MEMORY_PERCENT} % of the available host memory, "
        "at most the size of the KV cache",
        "engine.enablePrefixCaching": str(cache.enable_prefix_caching).lower(),
        "engine.maxNumBatchedTokens": scheduler.max_num_batched_tokens,
        "engine.longPrefillTokenThreshold": scheduler.long_prefill_token_threshold,
        "engine.maxNumSeqs": scheduler.max_num_seqs,
        "engine.maxQueue": scheduler.max_queue,
        "engine.schedulingPolicy": scheduler.policy,
        "engine.preemptionMode": scheduler.preemption_mode,
        "engine.asyncScheduling": str(scheduler.async_scheduling).lower(),
        "engine.stepTimeoutSeconds": f"{ParallelConfig().step_timeout_s:g}",
        "engine.enforceEager": str(compilation.enforce_eager).lower(),
        "engine.compilationMode": compilation.mode,
        "engine.cudagraphMode": compilation.cudagraph_mode,
        "engine.logIterations": str(observed.log_iterations).lower(),
        "engine.countNansInLogits": str(observed.count_nans_in_logits).lower(),
        "kvTransfer.leaseSeconds": f"{transfer.lease_s:g}",
        "kvTransfer.loadTimeoutSeconds": f"{transfer.load_timeout_s:g}",
        "kvTransfer.maxInflightMemory": f"{transfer.max_inflight_bytes // 2**20}Mi",
        "kvTransfer.stagingMemory": f"{transfer.staging_bytes // 2**20}Mi",
        "gateway.maxConcurrentRequests": gateway["max_concurrent_requests"],
        "gateway.generationConfig": gateway["generation_config"],
        "gateway.prefillThresholdTokens": gateway["prefill_threshold_tokens"],
        "decode.autoscaling.holdSeconds": DEFAULT_HOLD_SECONDS,
    }
    fields = {path.removeprefix("."): node for path, node in nodes(SPEC)}
    reference = (MANIFESTS.parent / "docs/reference/api.md").read_text()
    for path, default in defaults.items():
        assert fields[path]["description"].endswith(f" Unset: {default}."), path
        section, name = path.rsplit(".", 1)
        table = reference.split(f"\n## spec.{section}\n", 1)[1].split("\n## ", 1)[0]
        [row] = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        is_value = " " not in str(default)
        assert (row.split(" | ")[2] == f"`{default}`") == is_value, path
        assert row.endswith(f" Unset: {default}. |") != is_value, path


def test_the_reference_has_every_field_and_every_rule() -> None:
    text = (MANIFESTS.parent / "docs/reference/api.md").read_text()
    for root in ("spec", "status"):
        for path, node in nodes(SCHEMA["properties"][root], root):
            if "properties" in node:
                section = text.split(f"\n## {path}\n", 1)[1].split("\n## ", 1)[0]
                assert [
                    name for name in node["properties"] if f"\n| `{name}` | " not in section
                ] == [], path
    assert [rule.cel for rule in RULES if rule.cel.replace("|", "\\|") not in text] == []


def test_every_number_of_the_spec_has_bounds() -> None:
    numbers = [
        (path, node)
        for path, node in nodes(SPEC)
        if node.get("type") == "integer" and "enum" not in node
    ]
    assert [path for path, node in numbers if not {"minimum", "maximum"} <= set(node)] == []


def test_the_schema_and_the_structs_have_the_same_defaults() -> None:
    def defaulted(node: dict[str, Any], value: Any) -> Any:
        for name, child in node.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = child["default"]
            if name in value:
                value[name] = defaulted(
                    child, dict(value[name]) if isinstance(value[name], dict) else value[name]
                )
        return value

    minimal = {"model": {"uri": "file:///m"}}
    assert llmservice.decode_spec(
        defaulted(SPEC, {"model": {"uri": "file:///m"}})
    ) == llmservice.decode_spec(minimal)


def test_the_scale_subresource_refers_to_decode() -> None:
    scale = custom_resource_definition()["spec"]["versions"][0]["subresources"]["scale"]
    assert set(scale.values()) == {
        ".spec.decode.replicas",
        ".status.decode.replicas",
        ".status.decode.selector",
    }
    assert {"replicas", "selector"} <= set(
        SCHEMA["properties"]["status"]["properties"]["decode"]["properties"]
    )


def test_errors_in_a_stored_object_are_named() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"decode\.replicas"):
        llmservice.decode_spec({"model": {"uri": "file:///m"}, "decode": {"replicas": -1}})
    with pytest.raises(msgspec.ValidationError, match=r"decode\.parallelism\.redundantExperts"):
        llmservice.decode_spec(
            {"model": {"uri": "file:///m"}, "decode": {"parallelism": {"redundantExperts": -1}}}
        )


def test_the_reference_is_up_to_date_and_a_stale_one_is_found(tmp_path: Path) -> None:
    root = MANIFESTS.parent
    stale = tmp_path / "api.md"
    stale.write_text("old")
    for page, code in ((root / "docs/reference/api.md", 0), (stale, 1)):
        command = [sys.executable, str(root / "hack/api_reference.py"), "--check", str(page)]
        assert subprocess.run(command, check=False).returncode == code, page
