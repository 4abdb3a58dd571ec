"""Computes the maximum length of a request that an engine accepts."""

from __future__ import annotations

import logging

from baton_engine.executor.base import ModelInfo
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


def fit_max_model_len(config: EngineConfig, info: ModelInfo) -> int:
    """Return the maximum number of tokens of a request, prompt and generated tokens together.

    A configured limit is not compared with the model's maximum here. The workers compare the two
    when they load the model.

    Raises:
        ConfigurationError: the KV memory holds fewer tokens than the configured limit. Also raised
            if the model runs each prompt in one step, and `scheduler.max_num_batched_tokens` is
            below the configured limit.
    """
    configured, capacity = config.model.max_model_len, info.num_blocks * config.cache.block_size
    budget = config.scheduler.max_num_batched_tokens
    if not info.chunks_prompts and budget < (configured or info.max_position_embeddings):
        if configured is not None:
            raise ConfigurationError(
                "InvalidConfig",
                f"scheduler.max_num_batched_tokens is {budget}, but a prompt of this model runs in "
                f"one step and model.max_model_len is {configured}: raise "
                "scheduler.max_num_batched_tokens or lower model.max_model_len",
            )
        logger.warning(
            "max_model_len is %d tokens, limited by scheduler.max_num_batched_tokens, because a "
            "prompt of this model runs in one step; the model's maximum is %d",
            budget,
            info.max_position_embeddings,
        )
        return min(budget, capacity)
    if configured is None:
        if capacity < info.max_position_embeddings:
            logger.warning(
                "max_model_len is %d tokens, limited by the KV memory; the model's maximum is %d; "
                "give the KV cache more memory to serve longer requests",
                capacity,
                info.max_position_embeddings,
            )
        return min(info.max_position_embeddings, capacity)
    if configured > capacity:
        raise ConfigurationError(
            "KVMemoryTooSmall",
            f"model.max_model_len is {configured} tokens, but the KV memory holds {capacity} "
            f"({info.num_blocks} blocks of {config.cache.block_size} tokens): lower "
            "model.max_model_len, or raise cache.memory_bytes, cache.num_blocks or, on a GPU, "
            "cache.gpu_memory_utilization",
        )
    return configured
