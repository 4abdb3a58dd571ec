"""What an engine core asks of whoever runs its steps."""

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

EXECUTORS = {
    "uniproc": "baton_engine.executor.uniproc.UniProcExecutor",
    "multiproc": "baton_engine.executor.multiproc.multiproc_executor.MultiprocExecutor",
    "external_launcher": "baton_engine.executor.external_launcher.ExternalLauncherExecutor",
    "ray": "baton_engine.executor.ray.RayExecutor",
}
"""Short names of `ParallelConfig.executor_class`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine core must know of a loaded model."""

    num_blocks: int
    """KV blocks allocated."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    compatibility_hash: str
    num_swap_blocks: int = 0
    """Host blocks that swapped requests may take."""
    num_offload_blocks: int = 0
    """Host blocks for what the prefix cache evicts."""
    num_sparse_layers: int = 0
    """Layers with experts."""
    num_experts: int = 0
    """Of each."""
    kv: KVCompatibility | None = None
    """What peers must have in common with this engine. None: it exchanges no KV blocks."""


class Executor(abc.ABC):
    """Runs steps on one or more workers. All methods but `interrupt` are called by the engine's thread.

    One step is two calls, `execute_model` then `sample_tokens`; between them the caller computes what the model does not need but
    the sampler does. Up to `max_concurrent_batches` steps may be between their first call and the end of their future.
    """

    max_concurrent_batches: int = 1
    """Steps in flight: pipeline stages, or 2 with asynchronous scheduling."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        """Must be cheap; `initialize` does the work.

        Args:
            instance_id: of this engine process.
            wakeup: called from any thread when a step would find something new in its connector.
        """
        self.config = config
        self.instance_id = instance_id
        self.wakeup = wakeup
        self._pid = os.getpid()

    @property
    def is_forked_copy(self) -> bool:
        """Whether this is the copy in a forked child. What it would shut down, also when that child exits, is its parent's."""
        return os.getpid() != self._pid

    @abc.abstractmethod
    def initialize(self) -> ModelInfo:
        """Loads the model, allocates the KV cache, warms up.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> None:
        """Starts a step. Returns before the model has run; what goes wrong is raised by the future of `sample_tokens`."""

    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Ends the step that was started last: samples from its logits, and ends its transfers.

        Returns:
            The result. Any exception in it means that the engine cannot go on, except GroupBrokenError: the exchange of experts
            with other engines failed, the step is dropped, and steps of another generation may follow.
        """

    @abc.abstractmethod
    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        """Calls a method of every worker, after all steps started so far. Results in rank order.

        Raises:
            TimeoutError: a worker did not answer in time.
            WorkerError: the method failed on a worker; the message has its traceback.
            WorkerDiedError: a worker process is gone.
        """

    def interrupt(self, nonce: str = "") -> None:
        """Ends an exchange with other engines that a step waits in: its future raises GroupBrokenError. By any thread, at once.

        Executors that serve expert-parallel groups have it; the others refuse such configurations.

        Args:
            nonce: only if the workers are in that generation; empty: whichever it is.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve expert-parallel groups")

    @abc.abstractmethod
    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        """`callback(reason)` is called once, from any thread, when a worker process dies."""

    @abc.abstractmethod
    def connector_stats(self) -> ConnectorStats | None:
        """None without a KV connector."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends workers and connections. Idempotent; also after a failed `initialize`. Nothing in a forked child."""


class WorkerError(RuntimeError):
    """A worker's method raised."""


class WorkerDiedError(RuntimeError):
    """A worker process ended; the message says which, and how."""


def executor_name(config: EngineConfig) -> str:
    """Qualified name of the executor class that `config.parallel` asks for."""
    name = config.parallel.executor_class
    if name == "auto":
        name = "multiproc" if config.parallel.world_size > 1 else "uniproc"
    return EXECUTORS.get(name, name)


def load_executor_class(qualified_name: str) -> type[Executor]:
    """The class `package.module.Class`. Raises ValueError if there is no such executor."""
    return load_class(qualified_name, Executor, "executor")


def load_class(qualified_name: str, base: type[Any], what: str) -> type[Any]:
    """The subclass of `base` called `package.module.Class`. Raises ValueError, naming `what`, if there is none."""
    module_name, _, class_name = qualified_name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"cannot load {what} {qualified_name!r}: it is no known name and not of the form package.module.Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {what} {qualified_name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{qualified_name} is not a subclass of {base.__module__}.{base.__name__}")
    return found
