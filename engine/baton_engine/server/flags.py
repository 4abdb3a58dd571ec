"""The flags of `baton-engine`, one per field of EngineConfig, and the bounds of those fields."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from baton_engine.models.errors import ConfigurationError
from baton_protocol.config import EngineConfig, KVRole, ParallelConfig


class Flag(NamedTuple):
    name: str
    #: Field of EngineConfig it sets.
    path: str
    type: Callable[[str], Any]
    help: str


def sizes(text: str) -> list[int]:
    """Parse numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"numbers with commas between them, like 1,2,4,8, got {text!r}"
        ) from None


FLAGS = [
    Flag("--model", "model.path", str, "folder of the checkpoint"),
    Flag("--served-model-name", "model.served_name", str, "name clients use"),
    Flag("--dtype", "model.dtype", str, "auto, float32, bfloat16 or float16"),
    Flag("--quantization", "model.quantization", str, "int8: weights in eight bits, on a CPU"),
    Flag("--max-model-len", "model.max_model_len", int, "prompt plus generated tokens"),
    Flag("--block-size", "cache.block_size", int, "tokens per KV block"),
    Flag("--num-blocks", "cache.num_blocks", int, "KV blocks"),
    Flag(
        "--kv-cache-memory-bytes",
        "cache.memory_bytes",
        int,
        "KV memory, if --num-blocks is not given",
    ),
    Flag(
        "--gpu-memory-utilization",
        "cache.gpu_memory_utilization",
        float,
        "fraction of GPU memory to use",
    ),
    Flag(
        "--enable-prefix-caching",
        "cache.enable_prefix_caching",
        bool,
        "reuse KV blocks of earlier requests",
    ),
    Flag(
        "--max-num-batched-tokens",
        "scheduler.max_num_batched_tokens",
        int,
        "token budget of one step",
    ),
    Flag("--max-num-seqs", "scheduler.max_num_seqs", int, "running requests"),
    Flag("--max-queue", "scheduler.max_queue", int, "waiting requests"),
    Flag("--kv-role", "kv_transfer.role", str, ", ".join(role.value for role in KVRole)),
    Flag("--kv-transport", "kv_transfer.transport", str, "ucx, tcp, shm, auto or nixl"),
    Flag(
        "--kv-rdma",
        "kv_transfer.rdma",
        bool,
        "refuse to start without an RDMA device and a UCX with verbs",
    ),
    Flag("--kv-port", "kv_transfer.port", int, "port of the KV side channel"),
    Flag("--kv-load-failure-policy", "kv_transfer.load_failure_policy", str, "recompute or fail"),
    Flag(
        "--kv-load-timeout-s",
        "kv_transfer.load_timeout_s",
        float,
        "seconds that a consumer waits without progress",
    ),
    Flag(
        "--kv-lease-s",
        "kv_transfer.lease_s",
        float,
        "seconds that a producer waits for its consumer",
    ),
    Flag(
        "--kv-mode",
        "kv_transfer.mode",
        str,
        "pull (this engine reads blocks) or push (the producer writes them)",
    ),
    Flag(
        "--kv-max-inflight-bytes",
        "kv_transfer.max_inflight_bytes",
        int,
        "bytes in flight with one peer",
    ),
    Flag(
        "--kv-staging-bytes",
        "kv_transfer.staging_bytes",
        int,
        "pinned host memory for KV transfers of a GPU",
    ),
    Flag("--watermark", "cache.watermark", float, "fraction of blocks that admission leaves free"),
    Flag(
        "--swap-memory-bytes",
        "cache.swap_memory_bytes",
        int,
        "host memory for blocks of preempted groups",
    ),
    Flag(
        "--offload-memory-bytes",
        "cache.offload_memory_bytes",
        int,
        "host memory for evicted prefix blocks",
    ),
    Flag(
        "--enable-kv-events",
        "cache.enable_kv_events",
        bool,
        "publish changes of the prefix cache",
    ),
    Flag("--scheduling-policy", "scheduler.policy", str, "priority or fcfs"),
    Flag(
        "--enable-chunked-prefill",
        "scheduler.enable_chunked_prefill",
        bool,
        "run long prompts in several steps",
    ),
    Flag(
        "--long-prefill-token-threshold",
        "scheduler.long_prefill_token_threshold",
        int,
        "most tokens of one prompt in a step while shorter ones wait",
    ),
    Flag("--preemption-mode", "scheduler.preemption_mode", str, "auto, recompute or swap"),
    Flag(
        "--async-scheduling",
        "scheduler.async_scheduling",
        bool,
        "schedule a step while the last one runs",
    ),
    Flag("--scheduler-class", "scheduler.scheduler_class", str, "qualified name"),
    Flag(
        "--tensor-parallel-size",
        "parallel.tensor_parallel_size",
        int,
        "ranks that share each layer",
    ),
    Flag(
        "--pipeline-parallel-size",
        "parallel.pipeline_parallel_size",
        int,
        "stages the layers are split into",
    ),
    Flag(
        "--executor",
        "parallel.executor_class",
        str,
        "auto, uniproc, multiproc, external_launcher, ray, or a class",
    ),
    Flag("--worker-class", "parallel.worker_class", str, "qualified name"),
    Flag(
        "--enable-expert-parallel",
        "parallel.enable_expert_parallel",
        bool,
        "run as a rank of an expert-parallel group",
    ),
    Flag("--coordinator", "parallel.coordinator", str, "host:port of the group's coordinator"),
    Flag(
        "--rank-name",
        "parallel.rank_name",
        str,
        "name of this rank in topologies; $POD_NAME if not given",
    ),
    Flag(
        "--num-redundant-experts",
        "parallel.num_redundant_experts",
        int,
        "additional copies of experts in each layer of the group",
    ),
    Flag(
        "--collective-timeout-s",
        "parallel.collective_timeout_s",
        float,
        "seconds that a worker waits for another one",
    ),
    Flag(
        "--step-timeout-s",
        "parallel.step_timeout_s",
        float,
        "seconds after which a silent worker counts as dead",
    ),
    Flag(
        "--enforce-eager",
        "compilation.enforce_eager",
        bool,
        "neither torch.compile nor CUDA graphs",
    ),
    Flag("--compilation-mode", "compilation.mode", str, "auto, none, eager or inductor"),
    Flag(
        "--cudagraph-mode",
        "compilation.cudagraph_mode",
        str,
        "auto, none, piecewise, full, full_decode_only or full_and_piecewise",
    ),
    Flag(
        "--capture-sizes",
        "compilation.capture_sizes",
        sizes,
        "numbers of tokens to capture graphs for: 1,2,4,8",
    ),
    Flag(
        "--compile-sizes",
        "compilation.compile_sizes",
        sizes,
        "numbers of tokens with compiled code of their own",
    ),
    Flag(
        "--compile-cache-dir",
        "compilation.cache_dir",
        str,
        "folder for compiled code, reused by the next start",
    ),
    Flag("--log-iterations", "observability.log_iterations", bool, "one log line per step"),
    Flag(
        "--count-nans-in-logits",
        "observability.count_nans_in_logits",
        bool,
        "report NaNs per output",
    ),
    Flag("--profiler-dir", "observability.profiler_dir", str, "folder for torch profiles"),
    Flag(
        "--crash-dump-dir",
        "observability.crash_dump_dir",
        str,
        "folder for the input of a failed step",
    ),
    Flag("--device", "device", str, "auto, cpu or cuda"),
    Flag("--num-threads", "num_threads", int, "compute threads of each worker"),
    Flag(
        "--bind-threads",
        "bind_threads",
        bool,
        "bind each worker process to cores of its own",
    ),
    Flag("--engine-port", "engine_port", int, "port of the engine's ROUTER"),
    Flag("--http-port", "http_port", int, "port of health, metrics and drain"),
    Flag(
        "--service-key-file",
        "service_key_file",
        str,
        "file with the key of the service",
    ),
    Flag(
        "--drain-timeout-s",
        "drain_timeout_s",
        float,
        "seconds for running requests to end after SIGTERM",
    ),
]


def check_bounds(config: EngineConfig) -> None:
    """Raise ConfigurationError for the first field with a value that cannot work.

    The message names the field and its bounds.
    """
    for problem in _problems(config):
        raise ConfigurationError("ConfigInvalid", problem)


def _problems(config: EngineConfig) -> Iterator[str]:
    cache, scheduler, parallel, transfer = (
        config.cache,
        config.scheduler,
        config.parallel,
        config.kv_transfer,
    )
    at_least = {
        "model.max_model_len": (config.model.max_model_len, 1),
        "cache.block_size": (cache.block_size, 1),
        "cache.num_blocks": (cache.num_blocks, 1),
        "cache.memory_bytes": (cache.memory_bytes, 1),
        "cache.swap_memory_bytes": (cache.swap_memory_bytes, 0),
        "cache.offload_memory_bytes": (cache.offload_memory_bytes, 0),
        "kv_transfer.max_inflight_bytes": (transfer.max_inflight_bytes, 1),
        "kv_transfer.staging_bytes": (transfer.staging_bytes, 1),
        "scheduler.max_num_batched_tokens": (scheduler.max_num_batched_tokens, 1),
        "scheduler.max_num_seqs": (scheduler.max_num_seqs, 1),
        "scheduler.max_queue": (scheduler.max_queue, 1),
        "scheduler.long_prefill_token_threshold": (scheduler.long_prefill_token_threshold, 0),
        "parallel.tensor_parallel_size": (parallel.tensor_parallel_size, 1),
        "parallel.pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "parallel.num_redundant_experts": (parallel.num_redundant_experts, 0),
        "num_threads": (config.num_threads, 1),
    }
    for name, (value, low) in at_least.items():
        if value is not None and value < low:
            yield f"{name} must be at least {low}, got {value}"

    # Written so that NaN is refused as well.
    timeouts = {
        "kv_transfer.load_timeout_s": transfer.load_timeout_s,
        "kv_transfer.lease_s": transfer.lease_s,
        "parallel.collective_timeout_s": parallel.collective_timeout_s,
        "parallel.step_timeout_s": parallel.step_timeout_s,
    }
    for name, seconds in timeouts.items():
        if not 0 < seconds < math.inf:
            yield f"{name} must be a positive number of seconds, got {seconds}"
    if not 0 <= config.drain_timeout_s < math.inf:
        yield f"drain_timeout_s must be 0 or more seconds, got {config.drain_timeout_s}"
    if not 0 < cache.gpu_memory_utilization <= 1:
        yield f"cache.gpu_memory_utilization must be in (0, 1], got {cache.gpu_memory_utilization}"
    if not 0 <= cache.watermark < 1:
        yield f"cache.watermark must be in [0, 1), got {cache.watermark}"
    ports = {
        "engine_port": config.engine_port,
        "http_port": config.http_port,
        "kv_transfer.port": transfer.port,
    }
    for name, port in ports.items():
        if not 0 <= port < 65536:
            yield f"{name} must be in [0, 65535], got {port}"

    if transfer.rdma and transfer.transport not in ("ucx", "auto"):
        yield f"kv_transfer.rdma needs transport ucx or auto, got {transfer.transport!r}"

    if parallel.enable_expert_parallel:
        yield from _expert_parallel_problems(parallel)

    choices = {
        "model.dtype": (config.model.dtype, ("auto", "float32", "bfloat16", "float16")),
        "scheduler.policy": (scheduler.policy, ("priority", "fcfs")),
        "scheduler.preemption_mode": (scheduler.preemption_mode, ("auto", "recompute", "swap")),
        "kv_transfer.transport": (
            transfer.transport,
            ("ucx", "tcp", "shm", "auto", "nixl"),
        ),
        "kv_transfer.mode": (transfer.mode, ("pull", "push")),
        "kv_transfer.load_failure_policy": (transfer.load_failure_policy, ("recompute", "fail")),
        "device": (config.device, ("auto", "cpu", "cuda")),
        "compilation.mode": (config.compilation.mode, ("auto", "none", "eager", "inductor")),
        "compilation.cudagraph_mode": (
            config.compilation.cudagraph_mode,
            ("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"),
        ),
    }
    for name, (chosen, allowed) in choices.items():
        if chosen not in allowed:
            yield f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {chosen!r}"

    if config.model.quantization not in (None, "int8"):
        yield f"model.quantization must be int8 or not given, got {config.model.quantization!r}"
    names = {
        "scheduler.scheduler_class": scheduler.scheduler_class,
        "parallel.worker_class": parallel.worker_class,
    }
    for name, qualified in names.items():
        if "." not in qualified:
            yield f"{name} must be a qualified name, package.module.Class, got {qualified!r}"
    if not scheduler.enable_chunked_prefill and config.model.max_model_len is not None:
        longest, budget = config.model.max_model_len, scheduler.max_num_batched_tokens
        if longest > budget:
            yield (
                f"scheduler.max_num_batched_tokens is {budget}, but without chunked prefill a "
                f"prompt runs in one step and model.max_model_len is {longest}: "
                "raise the first or lower the second"
            )


def _expert_parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    host, _, port = parallel.coordinator.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        yield (
            "parallel.coordinator must be host:port of the group's coordinator with "
            f"parallel.enable_expert_parallel, got {parallel.coordinator!r}"
        )
