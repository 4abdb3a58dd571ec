"""The wait for the output of a step: late outputs and the step timeout."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from baton_engine.core.step_records import StepFailedError
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput
from baton_protocol.options.config import (
    ParallelConfig,
)
from support.engine.core_rig import generate, make_core, request
from support.engine.engine_fakes import FakeExecutor, continuation


class LateFuture(Future[ModelRunnerOutput]):
    """Ends just after a wait for it has timed out."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._output = output

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._output)
            raise TimeoutError
        return super().result(timeout)


class LateExecutor(FakeExecutor):
    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return LateFuture(super().sample_tokens(grammar).result())


def test_a_step_that_ends_just_after_a_wait_timed_out_has_succeeded() -> None:
    core = make_core(LateExecutor)
    assert generate(core, request("a", [1, 2])) == {"a": continuation([1, 2], 6)}
    core.shutdown()


class SilentFuture(Future[ModelRunnerOutput]):
    """Ends after some waits of 0.5 s have timed out. Time does not pass."""

    def __init__(self, output: ModelRunnerOutput, num_timeouts: int) -> None:
        super().__init__()
        self._output = output
        self._num_timeouts = num_timeouts

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if self._num_timeouts and timeout is not None:
            assert timeout == 0.5
            self._num_timeouts -= 1
            raise TimeoutError
        return self._output


class SilentExecutor(FakeExecutor):
    num_timeouts = 3

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return SilentFuture(super().sample_tokens(grammar).result(), self.num_timeouts)


class MoreSilentExecutor(SilentExecutor):
    num_timeouts = 4


class WatchingExecutor(MoreSilentExecutor):
    watches_steps = True


@pytest.mark.parametrize("executor", [SilentExecutor, WatchingExecutor])
def test_a_step_may_take_until_the_step_timeout_or_until_the_executor_fails_it(executor) -> None:
    core = make_core(executor, parallel=ParallelConfig(step_timeout_s=2.0))
    assert generate(core, request("a", [1, 2])) == {"a": continuation([1, 2], 6)}
    core.shutdown()


def test_a_step_without_an_answer_fails_at_the_step_timeout() -> None:
    core = make_core(MoreSilentExecutor, parallel=ParallelConfig(step_timeout_s=2.0))
    with pytest.raises(
        StepFailedError,
        match=r"^step 0 failed: WorkerDiedError: the workers have not answered for 2 s "
        r"\(parallel\.step_timeout_s\)",
    ):
        generate(core, request("a", [1, 2]))
    core.shutdown()
