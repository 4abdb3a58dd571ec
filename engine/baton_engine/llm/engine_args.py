"""The offline API's keyword arguments as an EngineConfig."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from baton_protocol.config import EngineConfig


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of `LLM(model, ...)`. `EngineConfig` describes each and its default."""

    dtype: str
    quantization: str
    max_model_len: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    executor: str
    collective_timeout_s: float
    step_timeout_s: float
    worker_class: str
    block_size: int
    num_blocks: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    swap_memory_bytes: int
    offload_memory_bytes: int
    watermark: float
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    preemption_mode: str
    async_scheduling: bool
    scheduler_class: str
    enforce_eager: bool
    compilation_mode: str
    cudagraph_mode: str
    capture_sizes: Sequence[int]
    compile_sizes: Sequence[int]
    compile_cache_dir: str
    device: str
    num_threads: int
    bind_threads: bool
    log_iterations: bool
    profiler_dir: str
    crash_dump_dir: str


_PATHS = {
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "max_model_len": "model.max_model_len",
    "tensor_parallel_size": "parallel.tensor_parallel_size",
    "pipeline_parallel_size": "parallel.pipeline_parallel_size",
    "executor": "parallel.executor_class",
    "collective_timeout_s": "parallel.collective_timeout_s",
    "step_timeout_s": "parallel.step_timeout_s",
    "worker_class": "parallel.worker_class",
    "block_size": "cache.block_size",
    "num_blocks": "cache.num_blocks",
    "kv_cache_memory_bytes": "cache.memory_bytes",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "swap_memory_bytes": "cache.swap_memory_bytes",
    "offload_memory_bytes": "cache.offload_memory_bytes",
    "watermark": "cache.watermark",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "scheduling_policy": "scheduler.policy",
    "preemption_mode": "scheduler.preemption_mode",
    "async_scheduling": "scheduler.async_scheduling",
    "scheduler_class": "scheduler.scheduler_class",
    "enforce_eager": "compilation.enforce_eager",
    "compilation_mode": "compilation.mode",
    "cudagraph_mode": "compilation.cudagraph_mode",
    "capture_sizes": "compilation.capture_sizes",
    "compile_sizes": "compilation.compile_sizes",
    "compile_cache_dir": "compilation.cache_dir",
    "device": "device",
    "num_threads": "num_threads",
    "bind_threads": "bind_threads",
    "log_iterations": "observability.log_iterations",
    "profiler_dir": "observability.profiler_dir",
    "crash_dump_dir": "observability.crash_dump_dir",
}

#: Limit of waiting requests. A caller in the same process may pass any number of prompts.
_NO_LIMIT = 2**31 - 1
_AT_LEAST_ONE = (
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_threads",
)


def engine_config(model: str | Path, args: EngineArgs) -> EngineConfig:
    """Build the configuration of an engine in the caller's process.

    Raises:
        TypeError: there is no such argument.
        ValueError: a value has the wrong type or is out of bounds; the message names the argument.
    """
    fields: dict[str, Any] = {"model": {"path": str(model)}, "scheduler": {"max_queue": _NO_LIMIT}}
    for name, value in args.items():
        if name not in _PATHS:
            raise TypeError(
                f"LLM() has no argument {name!r}; there are {', '.join(sorted(_PATHS))}"
            )
        if value is None:
            continue
        if name in _AT_LEAST_ONE and isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        *sections, last = _PATHS[name].split(".")
        target = fields
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    try:
        return msgspec.convert(fields, EngineConfig)
    except msgspec.ValidationError as error:
        text = str(error)
        for name, path in _PATHS.items():
            text = text.replace(f"`$.{path}`", name)
        raise ValueError(text) from error
