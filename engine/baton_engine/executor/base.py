"""The interface of an executor, which runs an engine core's steps on workers."""

from __future__ import annotations

import abc
import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.config import EngineConfig
from baton_protocol.kv_compatibility import KVCompatibility

#: Classes by the short names of `ParallelConfig.executor_class`.
EXECUTORS = {
    "uniproc": "baton_engine.executor.uniproc.UniProcExecutor",
    "multiproc": "baton_engine.executor.multiproc.multiproc_executor.MultiprocExecutor",
    "external_launcher": "baton_engine.executor.external_launcher.ExternalLauncherExecutor",
    "ray": "baton_engine.executor.ray.RayExecutor",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine core needs to know of a loaded model."""

    #: KV blocks allocated.
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    compatibility_hash: str
    #: Host blocks for swapped requests.
    num_swap_blocks: int = 0
    #: Host blocks for prefix blocks that are evicted from the device.
    num_offload_blocks: int = 0
    #: Layers with experts.
    num_sparse_layers: int = 0
    #: Experts per such layer.
    num_experts: int = 0
    #: Properties that peers must share with this engine. None: it exchanges no KV blocks.
    kv: KVCompatibility | None = None


class Executor(abc.ABC):
    """Runs steps on one or more workers. Only `interrupt` may be called by other threads.

    One step is two calls, `execute_model` then `sample_tokens`. Between them the caller computes
    what only the sampler needs. Up to `max_concurrent_batches` steps may be between their first
    call and the end of their future.
    """

    #: Steps in flight: pipeline stages, or 2 with asynchronous scheduling.
    max_concurrent_batches: int = 1

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        """Create the executor without workers. `initialize` does the work.

        Args:
            instance_id: id of this engine process.
            wakeup: called from any thread when a step would find something new in its connector.
        """
        self.config = config
        self.instance_id = instance_id
        self.wakeup = wakeup
        self._pid = os.getpid()

    @property
    def is_forked_copy(self) -> bool:
        """Whether this is a copy in a forked child, which must leave its parent's workers alone."""
        return os.getpid() != self._pid

    @abc.abstractmethod
    def initialize(self) -> ModelInfo:
        """Load the model, allocate the KV cache and warm up.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step and return before the model has run.

        Errors are raised by the future of `sample_tokens`.
        """

    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """End the step that was started last: sample from its logits, and end its transfers.

        Returns:
            The result. After an exception the engine cannot continue, except after
            GroupBrokenError: the exchange of experts with other engines failed, the step is
            dropped, and steps of another generation may follow.
        """

    @abc.abstractmethod
    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker, after all steps started so far.

        Returns:
            The results in rank order.

        Raises:
            TimeoutError: a worker did not answer in time.
            WorkerError: the method failed on a worker; the message has its traceback.
            WorkerDiedError: a worker process has ended.
        """

    def interrupt(self, nonce: str = "") -> None:
        """Interrupt a step that waits in an exchange with other engines.

        Its future raises GroupBrokenError. Any thread may call this. Executors without it refuse
        expert-parallel configurations.

        Args:
            nonce: interrupt only workers in this generation. Empty: in any generation.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve expert-parallel groups")

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:  # noqa: B027
        """Set the callback for the death of a worker process.

        An executor without worker processes never calls it.

        Args:
            callback: called once with the reason, from any thread.
        """

    @abc.abstractmethod
    def connector_stats(self) -> ConnectorStats | None:
        """Return the connector's counters, or None without a KV connector."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End workers and connections. Idempotent, also after a failed `initialize`.

        Does nothing in a forked child.
        """


class WorkerError(RuntimeError):
    """A worker's method raised an exception."""


class WorkerDiedError(RuntimeError):
    """A worker process ended. The message names it and the cause."""


def executor_name(config: EngineConfig) -> str:
    """Return the qualified name of the executor class that `config.parallel` selects."""
    name = config.parallel.executor_class
    if name == "auto":
        name = "multiproc" if config.parallel.world_size > 1 else "uniproc"
    return EXECUTORS.get(name, name)


def load_executor_class(qualified_name: str) -> type[Executor]:
    """Import the executor `package.module.Class`. Raise ValueError if there is none."""
    return load_class(qualified_name, Executor, "executor")


def load_class(qualified_name: str, base: type[Any], what: str) -> type[Any]:
    """Import the subclass of `base` called `package.module.Class`.

    Args:
        what: kind of class, for the message.

    Raises:
        ValueError: there is no such class.
    """
    module_name, _, class_name = qualified_name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"cannot load {what} {qualified_name!r}: "
            "it is no known name and not of the form package.module.Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {what} {qualified_name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{qualified_name} is not a subclass of {base.__module__}.{base.__name__}")
    return found
