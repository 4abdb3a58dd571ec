"""How an executor gets its workers from nothing to ready, the same for all executors: in words that
every worker understands.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import msgspec

from baton_engine.executor.base import ModelInfo, load_class
from baton_engine.executor.placement import place_here
from baton_engine.models.errors import ConfigurationError
from baton_protocol.config import EngineConfig, KVRole

logger = logging.getLogger(__name__)

#: Starting a process, importing torch and meeting the others.
JOIN_TIMEOUT_S = 120.0
#: Reading weights, perhaps over a network.
LOAD_TIMEOUT_S = 1800.0


class CollectiveCall(Protocol):
    """`Executor.collective_rpc`."""

    def __call__(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]: ...


def initialize_workers(
    config: EngineConfig, call: CollectiveCall, wakeup_args: tuple[Any, ...] = ()
) -> ModelInfo:
    """Loads the model on all workers, gives all of them as many KV blocks as the poorest has room
    for, warms up and connects.

    Args:
        wakeup_args: of the workers' `open_connector`; empty where a function cannot be sent to
            them.

    Raises:
        ConfigurationError: the model or the configuration cannot be served.
    """
    started = time.monotonic()
    call("load_model", timeout_s=LOAD_TIMEOUT_S)
    logger.info("model %s loaded in %.1f s", config.model.path, time.monotonic() - started)
    rooms = call("num_available_blocks", timeout_s=LOAD_TIMEOUT_S)
    num_blocks = min(device for device, _ in rooms)
    num_swap_blocks = min(host for _, host in rooms)
    call("initialize_cache", (num_blocks, num_swap_blocks), timeout_s=LOAD_TIMEOUT_S)
    call("warm_up", timeout_s=LOAD_TIMEOUT_S)
    ranks = call("open_connector", wakeup_args, timeout_s=JOIN_TIMEOUT_S)
    if (
        config.kv_transfer.role is not KVRole.NONE
    ):  # every worker tells peers where the others answer
        call("connect", (ranks,), timeout_s=JOIN_TIMEOUT_S)
    info: ModelInfo = call("model_info", timeout_s=JOIN_TIMEOUT_S)[0]
    return info


def load_worker_class(config: EngineConfig) -> type[Any]:
    """The class that `parallel.worker_class` names. Raises ConfigurationError if there is none."""
    try:
        return load_class(config.parallel.worker_class, object, "worker")
    except ValueError as error:
        raise ConfigurationError("InvalidConfig", f"parallel.worker_class: {error}") from error


def output_rank(config: EngineConfig) -> int:
    """The global rank whose results count: of the last stage, the first tensor rank."""
    parallel = config.parallel
    return (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size


def num_concurrent_batches(config: EngineConfig) -> int:
    """Steps that workers in a pipeline, or behind an asynchronous scheduler, should have in flight."""
    return max(
        config.parallel.pipeline_parallel_size, 2 if config.scheduler.async_scheduling else 1
    )


def share_threads(config: EngineConfig, num_workers: int) -> EngineConfig:
    """With `num_threads` set: if it was not, what each worker of one host gets of the cores that
    this process may use.
    """
    if config.num_threads is not None:
        return config
    return msgspec.structs.replace(config, num_threads=place_here(num_workers)[0].num_threads)


def refuse_expert_parallel(config: EngineConfig, executor: str) -> None:
    """Raises ConfigurationError if experts are to be spread: the executor cannot interrupt a step
    that waits for other engines.
    """
    if config.parallel.enable_expert_parallel:
        raise ConfigurationError(
            "InvalidConfig",
            f"parallel.enable_expert_parallel is set, but executor {executor} cannot serve in an expert-parallel group; set "
            f"parallel.executor_class to auto, uniproc or multiproc",
        )


def check_single_worker(config: EngineConfig, executor: str) -> None:
    """Raises ConfigurationError if more than one worker is asked for."""
    if config.parallel.world_size > 1:
        raise ConfigurationError(
            "InvalidConfig",
            f"executor {executor} has one worker, but tensor_parallel_size x pipeline_parallel_size is "
            f"{config.parallel.world_size}; set parallel.executor_class to auto, multiproc, external_launcher or ray",
        )
