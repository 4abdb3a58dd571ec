"""Refuses settings and models with which workers cannot exchange KV blocks."""

from __future__ import annotations

from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import EngineConfig


def check_kv_transfer(config: EngineConfig, model: CheckpointConfig) -> None:
    """Check that an engine with this configuration can have a KV role.

    Raises:
        ConfigurationError: the model or a setting is incompatible with kv_transfer.role. The
            message names the setting.
    """
    role, parallel = config.kv_transfer.role.value, config.parallel
    if model.pooling is not None:
        raise ConfigurationError(
            "KVTransferInvalid",
            f"kv_transfer.role is {role}, but the model pools prompts, and no KV blocks are "
            "needed after a prompt; set kv_transfer.role to none (in an LLMService: remove "
            "prefill), or model.runner to generate",
        )
    if parallel.pipeline_parallel_size > 1:
        raise ConfigurationError(
            "KVTransferInvalid",
            f"kv_transfer.role is {role}, but KV blocks move only between workers that have "
            f"all layers, and pipeline_parallel_size is {parallel.pipeline_parallel_size}; set "
            "it to 1 (tensor_parallel_size may be more), or kv_transfer.role to none",
        )
    num_heads = model.num_kv_heads
    if parallel.tensor_parallel_size > num_heads:
        raise ConfigurationError(
            "KVTransferInvalid",
            f"tensor_parallel_size is {parallel.tensor_parallel_size} and the model has "
            f"{num_heads} KV heads, but kv_transfer.role is {role} and workers without KV "
            "heads of their own exchange no KV blocks; lower tensor_parallel_size (in an "
            "LLMService: parallelism.tensor), or set kv_transfer.role to none",
        )
