"""One worker in the engine's own process and thread."""

from __future__ import annotations

from collections.abc import Callable

from baton_engine.core.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.protocol.config import EngineConfig
from baton_engine.worker.worker import Worker
from baton_kv_transfer.connector import ConnectorStats


class UniProcExecutor(Executor):
    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self._worker = Worker(config, instance_id)

    def initialize(self) -> ModelInfo:
        return self._worker.initialize(self.wakeup)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute_model(step)

    def connector_stats(self) -> ConnectorStats | None:
        return self._worker.connector_stats()

    def shutdown(self) -> None:
        self._worker.shutdown()
