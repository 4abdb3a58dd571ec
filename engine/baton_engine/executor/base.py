"""The interface of an executor, which runs the steps of an engine core on workers."""

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
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.options.config import EngineConfig
from baton_protocol.pooling_params import PairFormat, Task

#: Classes by the short names of `ParallelConfig.executor_class`.
EXECUTORS = {
    "uniproc": "baton_engine.executor.uniproc.UniProcExecutor",
    "multiproc": "baton_engine.executor.multiproc.multiproc_executor.MultiprocExecutor",
    "external_launcher": "baton_engine.executor.external_launcher.ExternalLauncherExecutor",
    "ray": "baton_engine.executor.ray.RayExecutor",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model that the engine core needs."""

    #: Number of KV blocks allocated on each worker.
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    #: Maximum number of tokens that the model supports in one request.
    max_position_embeddings: int
    #: Equal on all engines that may exchange KV blocks.
    compatibility_hash: str
    #: Number of host blocks for swapped requests.
    num_swap_blocks: int = 0
    #: Number of host blocks for prefix blocks that are evicted from the device.
    num_offload_blocks: int = 0
    #: Number of layers with experts (sparse layers).
    num_sparse_layers: int = 0
    #: Number of experts in each sparse layer.
    num_experts: int = 0
    #: Bytes of one expert on all tensor ranks together. 0 without expert parallelism.
    expert_bytes: int = 0
    #: Properties that peers must share with this engine. None: the engine exchanges no KV blocks.
    kv: KVCompatibility | None = None
    #: What the engine does with prompts: generate text, or pool them to vectors or scores.
    task: Task = Task.GENERATE
    #: Number of entries in the vector of a pooled prompt.
    vector_size: int = 0
    #: Whether every token of a prompt must run, so that prompts use no cached KV.
    runs_whole_prompts: bool = False
    #: Whether a prompt may run in several steps.
    chunks_prompts: bool = True
    #: How two texts become one prompt. None: the model does not score pairs of texts.
    pair_format: PairFormat | None = None


class Executor(abc.ABC):
    """Runs steps on one or more workers.

    Each step takes two calls, `execute_model` and then `sample_tokens`. Between the two calls, the
    caller computes the grammar bitmask, which only the sampler needs. A step is in flight from
    `execute_model` until the future of `sample_tokens` is done. At most `max_concurrent_batches`
    steps may be in flight.

    Only `interrupt` may be called from any thread.
    """

    #: Maximum number of steps in flight: the number of pipeline stages, but at least 2 with
    #: asynchronous scheduling.
    max_concurrent_batches: int = 1
    #: Whether the executor fails a step that takes longer than `parallel.step_timeout_s`. If False,
    #: `StepWaiter` fails the step.
    watches_steps: bool = False

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        """Create the executor. `initialize` starts the workers.

        Args:
            config: configuration of the engine.
            instance_id: id of this engine process.
            wakeup: called, from any thread, when a worker's KV connector has something to report in
                the next step.
        """
        self.config = config
        self.instance_id = instance_id
        self.wakeup = wakeup
        self._pid = os.getpid()

    @property
    def is_forked_copy(self) -> bool:
        """Whether this object is a copy in a forked child process.

        The workers belong to the parent process, so the copy must not use them.
        """
        return os.getpid() != self._pid

    @abc.abstractmethod
    def initialize(self) -> ModelInfo:
        """Start the workers, load the model, allocate the KV cache and warm up.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step on all workers and return before the model has run.

        Errors of the step are raised by the future that `sample_tokens` returns.
        """

    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample the tokens of the step that `execute_model` started last.

        Args:
            grammar: tokens that structured outputs allow. None: no request of the step has a
                grammar.

        Returns:
            The results of the step. GroupBrokenError means that an exchange with other engines
            failed and that the workers have dropped the step. Later steps may follow. After any
            other exception the engine cannot continue.
        """

    @abc.abstractmethod
    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker, after all steps that were started before this call.

        Args:
            method: name of the method.
            args: positional arguments of the method, the same for every worker.
            timeout_s: limit for all answers. None: no limit.

        Returns:
            The results in rank order.

        Raises:
            TimeoutError: a worker did not answer in time.
            WorkerError: the method failed on a worker. The message contains the traceback.
            WorkerDiedError: a worker process has ended.
        """

    def interrupt(self, nonce: str = "") -> None:
        """Interrupt a step that waits for other engines of the expert-parallel group.

        The step's future raises GroupBrokenError. Any thread may call this method. Executors
        that do not implement this method refuse expert-parallel configurations.

        Args:
            nonce: nonce of a generation (ranks and expert placement). Only workers in this
                generation are interrupted. Empty: workers in any generation.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve expert-parallel groups")

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:  # noqa: B027
        """Set the function to call when a worker process dies.

        An executor without worker processes never calls the function.

        Args:
            callback: called at most once, from any thread, with the reason.
        """

    @abc.abstractmethod
    def connector_stats(self) -> ConnectorStats | None:
        """Return the counters of the workers' KV connectors, or None without a KV connector."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Shut down the workers and close all connections. Idempotent.

        May be called after a failed `initialize`. Does nothing in a forked child.
        """


class WorkerError(RuntimeError):
    """A worker's method raised an exception."""


class WorkerDiedError(RuntimeError):
    """A worker process has ended or does not respond. The message gives the cause."""


def executor_name(config: EngineConfig) -> str:
    """Return the qualified name of the executor class that `config.parallel` selects."""
    name = config.parallel.executor_class
    if name == "auto":
        name = "multiproc" if config.parallel.world_size > 1 else "uniproc"
    return EXECUTORS.get(name, name)


def load_executor_class(qualified_name: str) -> type[Executor]:
    """Import an executor class by its qualified name, `package.module.Class`.

    Raises:
        ValueError: there is no such executor class.
    """
    return load_class(qualified_name, Executor, "executor")


def load_class(qualified_name: str, base: type[Any], what: str) -> type[Any]:
    """Import a subclass of `base` by its qualified name, `package.module.Class`.

    Args:
        qualified_name: name of the class.
        base: class that the imported class must extend.
        what: kind of class, for error messages.

    Raises:
        ValueError: there is no such class.
    """
    module_name, _, class_name = qualified_name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"cannot load {what} {qualified_name!r}: "
            "it is neither a known name nor of the form package.module.Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {what} {qualified_name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{qualified_name} is not a subclass of {base.__module__}.{base.__name__}")
    return found
