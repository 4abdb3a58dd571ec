"""An executor that returns immediately, so that a step contains only the engine's own work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from workload import MAX_MODEL_LEN, VOCAB_SIZE

from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig

TOKEN = 7


class InstantExecutor(Executor):
    """An executor that samples TOKEN for every request whose last token is scheduled."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        #: Called with every step, for measurements.
        self.before_step: Callable[[SchedulerOutput], None] = lambda step: None
        self._num_tokens: dict[str, int] = {}
        self._output = ModelRunnerOutput()

    def initialize(self) -> ModelInfo:
        assert self.config.cache.num_blocks is not None
        return ModelInfo(self.config.cache.num_blocks, VOCAB_SIZE, (0,), MAX_MODEL_LEN, "instant")

    def execute_model(self, step: SchedulerOutput) -> None:
        self.before_step(step)
        known, scheduled = self._num_tokens, step.num_scheduled_tokens
        for request_id in step.finished_request_ids:
            known.pop(request_id, None)
        sampled = {}
        for new in step.new_requests:
            num_tokens = len(new.prompt_token_ids) + len(new.generated_token_ids)
            known[new.request_id] = num_tokens
            if new.num_computed_tokens + scheduled[new.request_id] == num_tokens:
                sampled[new.request_id] = TOKEN
                known[new.request_id] += 1
        for cached in step.cached_requests:
            if (
                cached.num_computed_tokens + scheduled[cached.request_id]
                == known[cached.request_id]
            ):
                sampled[cached.request_id] = TOKEN
                known[cached.request_id] += 1
        self._output = ModelRunnerOutput(sampled_token_ids=sampled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._output)
        return future

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        raise NotImplementedError(method)

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        pass

    def connector_stats(self) -> ConnectorStats | None:
        return None

    def shutdown(self) -> None:
        pass
