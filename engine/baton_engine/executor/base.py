"""What an engine core asks of whoever runs its steps."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from baton_engine.core.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.protocol.config import EngineConfig
from baton_kv_transfer.connector import ConnectorStats


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine core must know of a loaded model."""

    num_blocks: int
    """KV blocks allocated."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    compatibility_hash: str


class Executor(abc.ABC):
    """Runs steps on one or more workers. All methods are called by the engine's thread."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        """Must be cheap; `initialize` does the work.

        Args:
            instance_id: of this engine process.
            wakeup: called from any thread when a step would find something new in its connector.
        """
        self.config = config
        self.instance_id = instance_id
        self.wakeup = wakeup

    @abc.abstractmethod
    def initialize(self) -> ModelInfo:
        """Loads the model, allocates the KV cache, warms up.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Any exception means that the engine cannot go on."""

    @abc.abstractmethod
    def connector_stats(self) -> ConnectorStats | None:
        """None without a KV connector."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends workers and connections. Idempotent; also after a failed `initialize`."""


def load_executor_class(qualified_name: str) -> type[Executor]:
    """The class `package.module.Class`. Raises ValueError if there is no such executor."""
    module_name, _, class_name = qualified_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load executor {qualified_name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ValueError(f"{qualified_name} is not a subclass of {Executor.__module__}.Executor")
    return found
