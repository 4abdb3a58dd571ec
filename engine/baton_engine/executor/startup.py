"""Loads the model on new workers and allocates the KV cache. All executors use these functions."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import msgspec

from baton_engine.executor.base import ModelInfo, load_class
from baton_engine.executor.cpu_binding import assign_usable_cores
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import EngineConfig, KVRole

logger = logging.getLogger(__name__)

#: Limit for starting a process, importing torch and joining the other workers.
JOIN_TIMEOUT_S = 120.0
#: Limit for each of four operations: reading weights (perhaps over a network), measuring memory,
#: allocating the KV cache, and warming up (which may compile the model).
LOAD_TIMEOUT_S = 1800.0


class CollectiveCall(Protocol):
    """The signature of `Executor.collective_rpc`."""

    def __call__(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]: ...


def initialize_workers(
    config: EngineConfig, call: CollectiveCall, wakeup_args: tuple[Any, ...] = ()
) -> ModelInfo:
    """Load the model on all workers, allocate KV blocks, warm up and open KV connectors.

    All workers allocate as many blocks as the worker with the least memory can hold.

    Args:
        config: configuration of the engine.
        call: calls a method of every worker.
        wakeup_args: arguments of the workers' `open_connector`: the wakeup function. Empty if a
            function cannot be sent to the workers.

    Raises:
        ConfigurationError: the model or the configuration cannot be served.
    """
    started = time.monotonic()
    call("load_model", timeout_s=LOAD_TIMEOUT_S)
    logger.info("model %s loaded in %.1f s", config.model.path, time.monotonic() - started)
    available = call("num_available_blocks", timeout_s=LOAD_TIMEOUT_S)
    num_blocks = min(device for device, _ in available)
    num_swap_blocks = min(host for _, host in available)
    call("initialize_cache", (num_blocks, num_swap_blocks), timeout_s=LOAD_TIMEOUT_S)
    call("warm_up", timeout_s=LOAD_TIMEOUT_S)
    ranks = call("open_connector", wakeup_args, timeout_s=JOIN_TIMEOUT_S)
    # Every worker gives peers the addresses of all workers.
    if config.kv_transfer.role is not KVRole.NONE:
        call("connect", (ranks,), timeout_s=JOIN_TIMEOUT_S)
    return call("model_info", timeout_s=JOIN_TIMEOUT_S)[0]


def load_worker_class(config: EngineConfig) -> type[Any]:
    """Import the class that `config.parallel.worker_class` names.

    Raises:
        ConfigurationError: there is no such class.
    """
    try:
        return load_class(config.parallel.worker_class, object, "worker")
    except ValueError as error:
        raise ConfigurationError("InvalidConfig", f"parallel.worker_class: {error}") from error


def output_rank(config: EngineConfig) -> int:
    """Return the global rank that reports the results of steps.

    This is the first tensor-parallel rank of the last pipeline stage.
    """
    parallel = config.parallel
    return (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size


def num_concurrent_batches(config: EngineConfig) -> int:
    """Return how many steps may be in flight.

    This is the number of pipeline stages, but at least 2 with asynchronous scheduling.
    """
    return max(
        config.parallel.pipeline_parallel_size, 2 if config.scheduler.async_scheduling else 1
    )


def share_threads(config: EngineConfig, num_workers: int) -> EngineConfig:
    """Return the configuration with `num_threads` set.

    An unset `num_threads` becomes one worker's share of the cores that this process may use.
    """
    if config.num_threads is not None:
        return config
    return msgspec.structs.replace(
        config, num_threads=assign_usable_cores(num_workers)[0].num_threads
    )


def refuse_expert_parallel(config: EngineConfig, executor: str) -> None:
    """Raise ConfigurationError if the configuration enables expert parallelism.

    Called by executors that cannot interrupt a step that waits for other engines.

    Args:
        executor: name of the executor, for the message.
    """
    if config.parallel.enable_expert_parallel:
        raise ConfigurationError(
            "InvalidConfig",
            f"parallel.enable_expert_parallel is set, but executor {executor} cannot serve in an "
            "expert-parallel group; set parallel.executor_class to auto, uniproc or multiproc",
        )
