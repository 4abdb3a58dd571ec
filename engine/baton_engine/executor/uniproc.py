"""The executor of one worker in a thread of the engine's process.

The engine's own thread can schedule while the model runs. Another thread waits for pending tokens,
so that the worker can prepare the next step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.executor.commands import CommandFailure
from baton_engine.executor.futures import complete, wait_for_answers
from baton_engine.executor.startup import (
    initialize_workers,
    load_worker_class,
    num_concurrent_batches,
    share_threads,
)
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.models.errors import ConfigurationError
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


class UniProcExecutor(Executor):
    """Runs one worker in a thread of this process."""

    #: Maximum wait for the worker to end. The worker cannot end while a step hangs in its thread.
    shutdown_timeout_s = 10.0

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self.max_concurrent_batches = num_concurrent_batches(config)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._pending_outputs = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outputs")
        self._worker: Any = None  # of the class that the configuration names
        self._forward: Future[None] | None = None

    def initialize(self) -> ModelInfo:
        if self.config.parallel.world_size > 1:
            raise ConfigurationError(
                "InvalidConfig",
                "executor uniproc has one worker, but tensor_parallel_size x "
                f"pipeline_parallel_size is {self.config.parallel.world_size}; set "
                "parallel.executor_class to auto, multiproc, external_launcher or ray",
            )
        # torch reads OMP_NUM_THREADS by itself, so an explicit setting wins.
        config = self.config if "OMP_NUM_THREADS" in os.environ else share_threads(self.config, 1)
        worker_class = load_worker_class(config)
        self._worker = self._thread.submit(worker_class, config, self.instance_id).result()
        return initialize_workers(config, self.collective_rpc, wakeup_args=(self.wakeup,))

    def execute_model(self, step: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._worker.execute_model, step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        forward, self._forward = self._forward, None
        assert forward is not None, "call execute_model() first"

        result: Future[ModelRunnerOutput] = Future()

        def sample() -> None:
            try:
                forward.result()  # raises the exception of the forward, if any
                output = self._sample(grammar)
                if isinstance(output, PendingOutput):
                    self._pending_outputs.submit(complete, result, output.result)
                else:
                    result.set_result(output)
            except BaseException as error:
                result.set_exception(error)

        self._thread.submit(sample)
        return result

    def _sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """Sample the tokens of the step that the worker ran last. Runs in the worker's thread."""
        return self._worker.sample_tokens(grammar)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        def call() -> Any:
            try:
                return getattr(self._worker, method)(*args)
            except Exception as error:
                raise CommandFailure.of(error, rank=0).exception(method) from error

        future = self._thread.submit(call)
        return [wait_for_answers(future, timeout_s, method, 1, ())]

    def interrupt(self, nonce: str = "") -> None:
        worker = self._worker  # another thread may shut down
        if worker is not None:
            worker.interrupt(nonce)

    def connector_stats(self) -> ConnectorStats | None:
        return self._worker.connector_stats() if self._worker is not None else None

    def shutdown(self) -> None:
        if self.is_forked_copy:
            return
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                ended = self._thread.submit(worker.shutdown)
            except RuntimeError:  # the interpreter is ending and has ended the thread
                worker.shutdown()
            else:
                wait_for_futures([ended], timeout=self.shutdown_timeout_s)
                if not ended.done():
                    logger.warning(
                        "the worker has not ended within %g s, because a step hangs; the worker's "
                        "thread keeps running until the process ends",
                        self.shutdown_timeout_s,
                    )
                    self._thread.shutdown(wait=False)
                    self._pending_outputs.shutdown(wait=False)
                    return
                ended.result()
        self._thread.shutdown()
        self._pending_outputs.shutdown(wait=False)  # a GPU that hangs holds this thread
