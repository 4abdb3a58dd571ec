"""`baton-engine`: one engine process, from a configuration file and flags that override its fields."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from baton_engine.core.admin_server import AdminServer
from baton_engine.core.engine_core_proc import EngineCoreProc
from baton_engine.core.metrics import engine_registry
from baton_engine.models.errors import ConfigurationError
from baton_engine.protocol.config import EngineConfig, KVRole, container_path, pod_ip

EX_CONFIG = 78
"""sysexits.h: the configuration cannot work; starting again without a change is pointless."""

logger = logging.getLogger(__name__)


class _Flag(NamedTuple):
    name: str
    path: str
    """Field of EngineConfig it sets."""
    type: type
    help: str


FLAGS = [
    _Flag("--model", "model.path", str, "folder of the checkpoint"),
    _Flag("--served-model-name", "model.served_name", str, "name clients use"),
    _Flag("--dtype", "model.dtype", str, "auto, float32, bfloat16 or float16"),
    _Flag("--max-model-len", "model.max_model_len", int, "prompt plus generated tokens"),
    _Flag("--block-size", "cache.block_size", int, "tokens per KV block"),
    _Flag("--num-blocks", "cache.num_blocks", int, "KV blocks"),
    _Flag("--kv-cache-memory-bytes", "cache.memory_bytes", int, "KV memory, if --num-blocks is not given"),
    _Flag("--gpu-memory-utilization", "cache.gpu_memory_utilization", float, "fraction of GPU memory to use"),
    _Flag("--enable-prefix-caching", "cache.enable_prefix_caching", bool, "keep KV blocks of ended requests findable"),
    _Flag("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", int, "token budget of one step"),
    _Flag("--max-num-seqs", "scheduler.max_num_seqs", int, "running requests"),
    _Flag("--max-queue", "scheduler.max_queue", int, "waiting requests"),
    _Flag("--kv-role", "kv_transfer.role", str, ", ".join(role.value for role in KVRole)),
    _Flag("--kv-transport", "kv_transfer.transport", str, "ucx, nixl or inproc"),
    _Flag("--kv-port", "kv_transfer.port", int, "port of the KV side channel"),
    _Flag("--kv-load-failure-policy", "kv_transfer.load_failure_policy", str, "recompute or fail"),
    _Flag("--kv-load-timeout-s", "kv_transfer.load_timeout_s", float, "a consumer's wait without progress"),
    _Flag("--kv-lease-s", "kv_transfer.lease_s", float, "a producer's wait for its consumer"),
    _Flag("--watermark", "cache.watermark", float, "fraction of blocks that admission leaves free"),
    _Flag("--swap-memory-bytes", "cache.swap_memory_bytes", int, "host memory for blocks of preempted groups"),
    _Flag("--enable-kv-events", "cache.enable_kv_events", bool, "publish what the prefix cache gains and loses"),
    _Flag("--scheduling-policy", "scheduler.policy", str, "priority or fcfs"),
    _Flag("--enable-chunked-prefill", "scheduler.enable_chunked_prefill", bool, "run long prompts in several steps"),
    _Flag(
        "--long-prefill-token-threshold",
        "scheduler.long_prefill_token_threshold",
        int,
        "most tokens of one prompt in a step while shorter ones wait",
    ),
    _Flag("--preemption-mode", "scheduler.preemption_mode", str, "auto, recompute or swap"),
    _Flag("--async-scheduling", "scheduler.async_scheduling", bool, "schedule a step while the last one runs"),
    _Flag("--scheduler-class", "scheduler.scheduler_class", str, "qualified name"),
    _Flag("--tensor-parallel-size", "parallel.tensor_parallel_size", int, "ranks that share each layer"),
    _Flag("--pipeline-parallel-size", "parallel.pipeline_parallel_size", int, "stages the layers are split into"),
    _Flag("--executor", "parallel.executor_class", str, "auto, uniproc, multiproc, external_launcher, ray, or a class"),
    _Flag("--worker-class", "parallel.worker_class", str, "qualified name"),
    _Flag("--log-iterations", "observability.log_iterations", bool, "one log line per step"),
    _Flag("--count-nans-in-logits", "observability.count_nans_in_logits", bool, "report NaNs per output"),
    _Flag("--profiler-dir", "observability.profiler_dir", str, "where torch profiles are written"),
    _Flag("--crash-dump-dir", "observability.crash_dump_dir", str, "where the input of a failing step is written"),
    _Flag("--device", "device", str, "auto, cpu or cuda"),
    _Flag("--num-threads", "num_threads", int, "compute threads"),
    _Flag("--engine-port", "engine_port", int, "port of the engine's ROUTER"),
    _Flag("--http-port", "http_port", int, "port of health, metrics and drain"),
    _Flag("--drain-timeout-s", "drain_timeout_s", float, "how long running requests may take to end after SIGTERM"),
]


def parse_config(argv: list[str]) -> tuple[EngineConfig, argparse.Namespace]:
    """Reads `--config FILE`, lays the flags over it.

    Raises:
        ConfigurationError: the file or a value is wrong; the message names the field.
    """
    parser = argparse.ArgumentParser(
        prog="baton-engine", description=__doc__, epilog="It binds $POD_IP, or 127.0.0.1 if that is not set."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="an EngineConfig as JSON; flags override its fields"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    for flag in FLAGS:
        if flag.type is bool:
            parser.add_argument(flag.name, dest=flag.path, action=argparse.BooleanOptionalAction, help=flag.help)
        else:
            parser.add_argument(flag.name, dest=flag.path, type=flag.type, help=flag.help, metavar="VALUE")
    args = parser.parse_args(argv)

    fields: dict[str, Any] = {}
    if args.config is not None:
        try:
            fields = msgspec.json.decode(container_path(str(args.config)).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError("ConfigInvalid", f"{args.config}: {error}") from error
    for flag in FLAGS:
        value = getattr(args, flag.path)
        if value is not None:
            *sections, name = flag.path.split(".")
            target = fields
            for section in sections:
                target = target.setdefault(section, {})
            target[name] = value
    try:
        config = msgspec.convert(fields, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError("ConfigInvalid", f"{args.config or 'flags'}: {error}") from error
    _check_bounds(config)
    return config, args


def _check_bounds(config: EngineConfig) -> None:
    at_least_one = {
        "model.max_model_len": config.model.max_model_len,
        "cache.block_size": config.cache.block_size,
        "cache.num_blocks": config.cache.num_blocks,
        "scheduler.max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "scheduler.max_num_seqs": config.scheduler.max_num_seqs,
        "scheduler.max_queue": config.scheduler.max_queue,
        "num_threads": config.num_threads,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ConfigurationError("ConfigInvalid", f"{name} must be at least 1, got {value}")
    positive = {
        "kv_transfer.load_timeout_s": config.kv_transfer.load_timeout_s,
        "kv_transfer.lease_s": config.kv_transfer.lease_s,
    }
    for name, seconds in positive.items():
        if not 0 < seconds < float("inf"):  # refuses NaN as well
            raise ConfigurationError("ConfigInvalid", f"{name} must be a positive number of seconds, got {seconds}")
    if config.kv_transfer.load_failure_policy not in ("recompute", "fail"):
        policy = config.kv_transfer.load_failure_policy
        raise ConfigurationError(
            "ConfigInvalid", f"kv_transfer.load_failure_policy must be recompute or fail, got {policy!r}"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs one engine until SIGTERM. Returns the process's exit code."""
    try:
        config, args = parse_config(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(
            level=args.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s [%(threadName)s] %(message)s",
            stream=sys.stderr,
        )
        return _serve(config)
    except ConfigurationError as error:
        logging.shutdown()
        print(f"FATAL {error.reason}: {' '.join(error.message.split())}", file=sys.stderr, flush=True)
        return EX_CONFIG


def _serve(config: EngineConfig) -> int:
    host = pod_ip()
    try:
        proc = EngineCoreProc(config, host)
    except zmq.ZMQError as error:
        logger.error("cannot bind %s:%d: %s", host, config.engine_port, error)
        return 1
    model_name = config.model.served_name or Path(config.model.path).name
    try:
        admin = AdminServer(host, config.http_port, proc, engine_registry(proc.stats, model_name))
    except OSError as error:
        logger.error("cannot bind %s:%d: %s", host, config.http_port, error)
        proc.io.close()
        return 1
    proc.install_signal_handlers()
    admin.start()
    logger.info("instance %s: engine port %d, http port %d on %s", proc.instance_id, proc.io.port, admin.port, host)
    try:
        return proc.run()
    finally:
        admin.close()


if __name__ == "__main__":
    sys.exit(main())
