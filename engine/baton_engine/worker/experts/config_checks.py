"""Refuses settings that are incompatible with expert parallelism."""

from __future__ import annotations

import torch

from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import EngineConfig


def check_expert_parallel(
    config: EngineConfig, model: CheckpointConfig, device: torch.device
) -> None:
    """Check that an engine with this configuration can be a rank of an expert-parallel group.

    Raises:
        ConfigurationError: a setting or the model is incompatible with
            parallel.enable_expert_parallel. The message names the setting.
    """
    parallel, compilation = config.parallel, config.compilation
    if not model.sparse_layers:
        raise _cannot(f"{model.architecture} has no experts; set enable_expert_parallel to false")
    if model.pooling is not None:
        raise _cannot(
            "the model pools prompts, and only generating models run in expert groups; set "
            "enable_expert_parallel to false, or model.runner to generate"
        )
    if parallel.pipeline_parallel_size > 1:
        raise _cannot(
            f"parallel.pipeline_parallel_size is {parallel.pipeline_parallel_size}, but ranks of "
            f"an expert group have all layers; set it to 1 (tensor_parallel_size may be more)"
        )
    if config.scheduler.async_scheduling:
        raise _cannot(
            "scheduler.async_scheduling is set, but ranks agree on every step before it is "
            "scheduled; set async_scheduling to false"
        )
    for name, value in (("mode", compilation.mode), ("cudagraph_mode", compilation.cudagraph_mode)):
        if value not in ("auto", "none") and not compilation.enforce_eager:
            raise _cannot(
                f"compilation.{name} is {value}, but exchanges with other ranks are neither "
                f"compiled nor captured; set it to none or leave it out"
            )
    if device.type == "cuda" and config.cache.num_blocks is None:
        raise _cannot(
            "cache.num_blocks is not set, but the number of ranks decides how much GPU memory the "
            "experts take; set cache.num_blocks so low that twice this rank's experts fit beside "
            "the KV cache, because a rank holds old and new experts while the topology changes"
        )


def _cannot(why: str) -> ConfigurationError:
    return ConfigurationError("InvalidConfig", f"parallel.enable_expert_parallel is set: {why}")
