"""Creates an engine's scheduler from the configuration and the sizes of the loaded model."""

from __future__ import annotations

import logging

import msgspec

from baton_engine.core.max_model_len import fit_max_model_len
from baton_engine.executor.base import ModelInfo, load_class
from baton_engine.grammar.structured_output import StructuredOutputManager
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.models.errors import ConfigurationError
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


def make_scheduler(
    config: EngineConfig, info: ModelInfo, structured_output: StructuredOutputManager
) -> Scheduler:
    """Create the scheduler of class `scheduler.scheduler_class`, with a KV cache manager.

    Args:
        config: configuration of the engine.
        info: sizes of the model and of the KV memory.
        structured_output: compiles grammars.

    Raises:
        ConfigurationError: the configuration cannot be served with this model and memory.
    """
    cache, scheduling = config.cache, config.scheduler
    if not info.chunks_prompts:
        scheduling = msgspec.structs.replace(
            scheduling, enable_chunked_prefill=False, long_prefill_token_threshold=0
        )
    max_model_len = fit_max_model_len(config, info)
    kv = KVCacheManager(
        info.num_blocks,
        cache.block_size,
        info.compatibility_hash,
        enable_prefix_caching=cache.enable_prefix_caching and not info.runs_whole_prompts,
        num_swap_blocks=info.num_swap_blocks,
        num_offload_blocks=info.num_offload_blocks,
        enable_events=cache.enable_kv_events,
    )
    try:
        scheduler_class = load_class(config.scheduler.scheduler_class, Scheduler, "scheduler")
    except ValueError as error:
        raise ConfigurationError("InvalidConfig", f"scheduler.scheduler_class: {error}") from error
    logger.info(
        "KV cache: %d blocks of %d tokens; in host memory %d blocks for swapping "
        "and %d for evicted prefixes; max_model_len %d",
        info.num_blocks,
        cache.block_size,
        info.num_swap_blocks,
        info.num_offload_blocks,
        max_model_len,
    )
    try:
        state = SchedulerState(
            scheduling,
            kv,
            max_model_len=max_model_len,
            eos_token_ids=info.eos_token_ids,
            watermark_blocks=int(cache.watermark * info.num_blocks),
            fail_on_load_error=config.kv_transfer.load_failure_policy == "fail",
            num_stages=config.parallel.pipeline_parallel_size,
            structured_output=structured_output,
        )
        scheduler: Scheduler = scheduler_class(state)
    except ValueError as error:
        raise ConfigurationError("InvalidConfig", str(error)) from error
    return scheduler
