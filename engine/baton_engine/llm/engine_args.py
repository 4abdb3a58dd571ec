"""Converts the keyword arguments of the offline API to an EngineConfig."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from baton_protocol.options.config import EngineConfig
from baton_protocol.options.engine_options import OPTIONS, problems
from baton_protocol.options.option import set_field


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of `LLM(model, ...)`, named like the flags of `baton-engine`.

    `EngineConfig` describes each argument and has the defaults.

    The arguments are repeated here for type checkers. A test compares names and types with the
    fields of `EngineConfig`.
    """

    runner: str
    classifier_from_token: Sequence[str]
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
    target_itl_s: float
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
    count_nans_in_logits: bool
    profiler_dir: str
    crash_dump_dir: str


#: Options by the name of the argument. The option's flag has the same name.
_OPTIONS = {
    name: option
    for option in OPTIONS
    if (name := option.flag[2:].replace("-", "_")) in EngineArgs.__annotations__
}


def engine_config(model: str | Path, args: EngineArgs) -> EngineConfig:
    """Build the configuration of an engine that runs in the caller's process.

    Raises:
        TypeError: an argument does not exist.
        ValueError: a value has the wrong type or is out of bounds. The message names the argument.
    """
    fields: dict[str, Any] = {
        "model": {"path": str(model)},
        "scheduler": {"max_queue": 2**31 - 1},  # the caller may pass any number of prompts
    }
    for name, value in args.items():
        if name not in _OPTIONS:
            raise TypeError(
                f"LLM() has no argument {name!r}; there are {', '.join(sorted(_OPTIONS))}"
            )
        if value is not None:
            set_field(fields, _OPTIONS[name].path, value)
    try:
        config = msgspec.convert(fields, EngineConfig)
    except msgspec.ValidationError as error:
        text = str(error)
        for name, option in _OPTIONS.items():
            text = text.replace(f"`$.{option.path}`", name)
        raise ValueError(text) from error
    names = {option.path: name for name, option in _OPTIONS.items()}
    for path, problem in problems(config):
        raise ValueError(f"{names.get(path, path)} {problem}")
    return config
