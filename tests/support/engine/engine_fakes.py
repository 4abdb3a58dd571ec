"""Executors with the fake model of `scheduling`, for tests of engine cores and their processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from baton_engine.executor.base import Executor, ModelInfo, WorkerError
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig
from support.engine.scheduling.fake_runner import (
    EOS,
    VOCAB_SIZE,
    FakeConnector,
    FakeRunner,
    continuation,
    next_token,
)

__all__ = ["EOS", "VOCAB_SIZE", "FakeConnector", "FakeRunner", "continuation", "next_token"]


class FakeExecutor(Executor):
    """Runs the fake model in a thread, as UniProcExecutor runs a real model.

    A step with the prompt [13, 13, 13] fails. A sleep at level 2 changes the weights.
    Environment variables: BATON_FAKE_STEP_S is the duration of a step, BATON_FAKE_LOAD_S the
    duration of the model load.
    """

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.runner = FakeRunner(config.cache.block_size, config.scheduler.max_num_batched_tokens)
        self.step_s = float(os.environ.get("BATON_FAKE_STEP_S", "0"))
        self.max_concurrent_batches = (
            2 if config.scheduler.async_scheduling else config.parallel.pipeline_parallel_size
        )
        self.compatibility_hash = "fake-hash"
        #: (method, *args) of collective_rpc.
        self.calls: list[tuple[Any, ...]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")

    def initialize(self) -> ModelInfo:
        time.sleep(float(os.environ.get("BATON_FAKE_LOAD_S", "0")))
        return ModelInfo(
            self.config.cache.num_blocks or 64, VOCAB_SIZE, (EOS,), 512, self.compatibility_hash
        )

    def execute_model(self, step: SchedulerOutput) -> None:
        self._step = step

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self._run, self._step)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if any(new.prompt_token_ids == [13, 13, 13] for new in step.new_requests):
            raise RuntimeError("the device is on fire")
        if not step.reaches_model_runner:
            return ModelRunnerOutput()
        time.sleep(self.step_s)
        return self.runner.execute_model(step)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        if method == "sleep":
            self.runner.memory.clear()
            if args == (2,):
                self.compatibility_hash = "hash of other weights"
        elif method not in ("wake_up", "start_profile", "stop_profile"):
            raise WorkerError(f"the worker has no {method}")
        self.calls.append((method, *args))
        return [self.compatibility_hash if method == "wake_up" else None]

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        self.failure_callback = callback

    def connector_stats(self) -> ConnectorStats | None:
        return None

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class SparseFakeExecutor(FakeExecutor):
    """Reports a model with two sparse layers of four experts."""

    def initialize(self) -> ModelInfo:
        return dataclasses.replace(
            super().initialize(), num_sparse_layers=2, num_experts=4, expert_bytes=96
        )


class SlowFakeExecutor(FakeExecutor):
    """Runs steps of 50 ms, so that a test can act during a step."""

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.step_s = 0.05


class FailedTransferExecutor(FakeExecutor):
    """Reports that its KV connector has failed."""

    def connector_stats(self) -> ConnectorStats | None:
        return ConnectorStats(failure="the KV connector failed: a defect")


class WorkerProcessExecutor(FakeExecutor):
    """Starts an idle worker process. A step with the prompt [14, 14, 14] never ends."""

    def initialize(self) -> ModelInfo:
        self._worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        print(f"worker process {self._worker.pid}", file=sys.stderr, flush=True)
        threading.Thread(target=self._watch, daemon=True).start()
        return super().initialize()

    def _watch(self) -> None:
        code = self._worker.wait()
        self.failure_callback(f"worker 0 (pid {self._worker.pid}) ended with code {code}")

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        if any(new.prompt_token_ids == [14, 14, 14] for new in self._step.new_requests):
            print("the step hangs", file=sys.stderr, flush=True)
            return Future()
        return super().sample_tokens(grammar)
