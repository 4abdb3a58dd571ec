"""One worker in the engine's own process, in a thread of its own: the engine's thread prepares while the model runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from baton_engine.core.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.protocol.config import EngineConfig
from baton_engine.worker.worker import Worker
from baton_kv_transfer.connector import ConnectorStats


class UniProcExecutor(Executor):
    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self._worker = Worker(config, instance_id)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._forward: Future[None] | None = None
        self.max_concurrent_batches = 2 if config.scheduler.async_scheduling else 1

    def initialize(self) -> ModelInfo:
        return self._thread.submit(self._worker.initialize, self.wakeup).result()

    def execute_model(self, step: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._worker.execute_model, step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        forward, self._forward = self._forward, None
        assert forward is not None, "execute_model() first"

        def sample() -> ModelRunnerOutput:
            forward.result()  # its exception, if it has one
            return self._worker.sample_tokens(grammar)

        return self._thread.submit(sample)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None) -> list[Any]:
        return [self._thread.submit(getattr(self._worker, method), *args).result(timeout_s)]

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Never called: the worker lives and dies with this process."""

    def connector_stats(self) -> ConnectorStats | None:
        return self._worker.connector_stats()

    def shutdown(self) -> None:
        self._thread.submit(self._worker.shutdown).result()
        self._thread.shutdown()
