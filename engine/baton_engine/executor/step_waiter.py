"""Waits for the results of a step, and fails if a worker has died or the step times out."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

from baton_engine.executor.base import Executor, WorkerDiedError
from baton_engine.executor.step import ModelRunnerOutput

#: Interval at which the wait for a step checks that the workers are alive.
_FAILURE_CHECK_S = 0.5


class StepWaiter:
    """Waits for the results of an executor's steps."""

    def __init__(
        self, executor: Executor, step_timeout_s: float, on_failure: Callable[[str], None]
    ) -> None:
        """Create the waiter, and set the failure callback of the executor.

        Args:
            executor: runs the steps.
            step_timeout_s: `parallel.step_timeout_s`. Not used if the executor itself checks this
                timeout (`Executor.watches_steps`).
            on_failure: called with the reason, from any thread, when a worker process dies or a
                step takes longer than the timeout.
        """
        self._timeout_s = math.inf if executor.watches_steps else step_timeout_s
        self._on_failure = on_failure
        self._failure = ""
        executor.set_failure_callback(self._fail)

    def wait(self, future: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        """Wait for the results of a step and return them.

        Args:
            future: the future that `Executor.sample_tokens` has returned for the step.

        Raises:
            WorkerDiedError: a worker has died, or the step takes longer than the timeout.
        """
        interval_s = min(_FAILURE_CHECK_S, self._timeout_s)
        # Add up the intervals instead of reading the clock. By the clock, a step would time out as
        # soon as this process continues after a stop (SIGSTOP).
        silent_s = 0.0
        while True:
            try:
                return future.result(timeout=interval_s)
            except TimeoutError:
                if future.done():  # the step ended after the timeout, or raised TimeoutError itself
                    return future.result()
                if self._failure:
                    raise WorkerDiedError(self._failure) from None
            silent_s += interval_s
            if silent_s >= self._timeout_s:
                reason = (
                    f"the workers have not answered for {self._timeout_s:g} s "
                    "(parallel.step_timeout_s); raise the timeout if steps take longer"
                )
                self._fail(reason)  # a utility call may catch the exception
                raise WorkerDiedError(reason)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._on_failure(reason)
