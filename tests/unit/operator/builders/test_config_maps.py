"""The configurations of engines and gateways."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_operator.builders import config_maps
from baton_operator.names import ConfiguredRole
from baton_protocol.options.config import EngineConfig, GatewayConfig, KVRole, KVTransferConfig
from support.operator.services import decoded_config, resolved


def test_engines_get_their_role_in_kv_transfers() -> None:
    assert decoded_config("prefill", EngineConfig, prefill={}).kv_transfer.role is KVRole.PRODUCER
    assert decoded_config("decode", EngineConfig, prefill={}).kv_transfer.role is KVRole.CONSUMER
    assert decoded_config("decode", EngineConfig).kv_transfer.role is KVRole.NONE


def test_prefill_and_decode_may_have_different_tensor_parallel_sizes() -> None:
    spec = {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 4}}}
    assert decoded_config("prefill", EngineConfig, **spec).parallel.tensor_parallel_size == 2
    assert decoded_config("decode", EngineConfig, **spec).parallel.tensor_parallel_size == 4
    assert decoded_config("decode", EngineConfig).parallel.tensor_parallel_size == 1


@pytest.mark.parametrize("transport", ["ucx", "tcp", "shm", "nixl", "auto"])
def test_the_transport_is_passed_to_the_engine(transport: str) -> None:
    got = decoded_config(
        "prefill", EngineConfig, prefill={}, kvTransfer={"transport": transport}
    ).kv_transfer
    assert (got.transport, got.rdma) == (transport, False)
    assert decoded_config(
        "prefill", EngineConfig, prefill={}, kvTransfer={"rdma": True}
    ).kv_transfer == KVTransferConfig(role=KVRole.PRODUCER, transport="ucx", rdma=True)


def test_an_engine_configuration_has_only_the_fields_of_the_spec() -> None:
    tuned = {
        "blockSize": 32,
        "kvCacheMemory": "2Mi",
        "maxNumSeqs": 3,
        "numThreads": 2,
        "device": "cpu",
    }
    tuned |= {"offloadMemory": "1Gi"}
    model = {"uri": "file:///m", "dtype": "float32", "quantization": "int8"}
    got = decoded_config(
        "decode",
        EngineConfig,
        model=model,
        engine=tuned,
        kvTransfer={"loadFailurePolicy": "fail", "mode": "push", "transport": "nixl"},
        drainTimeoutSeconds=9,
    )
    assert (got.model.dtype, got.model.quantization) == ("float32", "int8")
    assert (got.cache.block_size, got.cache.memory_bytes, got.scheduler.max_num_seqs) == (
        32,
        2 * 2**20,
        3,
    )
    assert (got.num_threads, got.device, got.drain_timeout_s) == (2, "cpu", 9.0)
    assert got.cache.offload_memory_bytes == 2**30
    transfer = got.kv_transfer
    assert (transfer.load_failure_policy, transfer.mode, transfer.transport) == (
        "fail",
        "push",
        "nixl",
    )
    assert (
        got.scheduler.max_num_batched_tokens
        == EngineConfig(model=got.model).scheduler.max_num_batched_tokens
    )
    plain = json.loads(config_maps.build(resolved(), "decode")["data"]["decode.json"])
    assert "cache" not in plain


def test_a_gateway_configuration_has_the_service_and_the_served_name() -> None:
    got = decoded_config(
        "gateway",
        GatewayConfig,
        model={"uri": "file:///m", "servedName": "x"},
        gateway={"prefillThresholdTokens": 8, "generationConfig": "none"},
    )
    assert got.generation_config == "none"
    assert (got.discovery.service, got.discovery.namespace) == ("demo", "default")
    assert (got.model.served_name, got.prefill_threshold_tokens) == ("x", 8)
    assert decoded_config("gateway", GatewayConfig).model.served_name == "demo"


def test_default_access_settings_do_not_change_the_revision() -> None:
    """The revision must not change with an operator that has more fields."""
    plain = config_maps.build(resolved(), "gateway")["data"]["gateway.json"]
    assert "access" not in plain
    assert "pipeline" not in config_maps.build(resolved(), "decode")["data"]["decode.json"]


@pytest.mark.parametrize(("role", "stages"), [("decode", 3), ("prefill", 1)])
def test_only_decode_has_pipeline_stages(role: ConfiguredRole, stages: int) -> None:
    spec: dict[str, Any] = {"decode": {"parallelism": {"tensor": 2, "pipeline": 3}}}
    assert decoded_config(role, EngineConfig, **spec).parallel.pipeline_parallel_size == stages
