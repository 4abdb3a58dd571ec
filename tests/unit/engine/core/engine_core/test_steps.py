"""The order of calls in a step, several steps in flight, aborts during a step, and failed steps."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.step_records import StepFailedError
from baton_engine.executor.base import ModelInfo
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.scheduling.scheduler import Scheduler
from baton_protocol.engine_messages import EngineCoreOutput, FinishReason
from baton_protocol.options.config import (
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from support.engine.core_rig import generate, make_config, make_core, request
from support.engine.engine_fakes import FakeExecutor, continuation

#: The calls in order. Tests that read it clear it.
calls: list[str] = []


class RecordingScheduler(Scheduler):
    def grammar_output(self, step: SchedulerOutput) -> GrammarOutput | None:
        calls.append(f"grammar {step.step_id}")
        return super().grammar_output(step)

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        calls.append(f"update {step.step_id}")
        return super().update_from_output(step, output)

    def abort_requests(self, request_ids) -> None:
        request_ids = list(request_ids)
        if request_ids:
            calls.append(f"abort {','.join(request_ids)}")
        super().abort_requests(request_ids)


class HeldExecutor(FakeExecutor):
    """Ends a step on `release`."""

    def initialize(self) -> ModelInfo:
        self.held: list[tuple[Future[ModelRunnerOutput], ModelRunnerOutput]] = []
        return super().initialize()

    def execute_model(self, step: SchedulerOutput) -> None:
        calls.append(f"execute {step.step_id}")
        super().execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        calls.append(f"sample {self._step.step_id}")
        self.held.append((Future(), self._run(self._step)))
        return self.held[-1][0]

    def release(self) -> None:
        """End the oldest step."""
        future, output = self.held.pop(0)
        future.set_result(output)


RECORDING = SchedulerConfig(scheduler_class=f"{__name__}.RecordingScheduler")
PIPELINE = ParallelConfig(pipeline_parallel_size=2)


def test_the_grammar_mask_is_computed_between_execute_and_sample() -> None:
    core = make_core(HeldExecutor, scheduler=RECORDING, parallel=PIPELINE)
    core.add_request(request("r", [1, 2]))
    calls.clear()
    assert core.step_fn() == []
    assert [call.split()[0] for call in calls] == ["execute", "grammar", "sample"]


def test_steps_start_until_the_batch_queue_is_full_and_end_in_order() -> None:
    core = make_core(HeldExecutor, scheduler=RECORDING, parallel=PIPELINE)
    core.add_request(request("a", [1, 2], 2))
    calls.clear()
    assert core.step_fn() == []
    assert core.made_progress, "there is room for another step"
    core.add_request(request("b", [3, 4], 2))
    core.executor.release()  # the step of a
    (output,) = core.step_fn()
    assert output.request_id == "a"
    first, second = (call.split()[1] for call in calls if call.startswith("execute"))
    assert [call for call in calls if not call.startswith("grammar")] == [
        *(
            f"execute {first}",
            f"sample {first}",
            f"execute {second}",
            f"sample {second}",
            f"update {first}",
        )
    ]


def test_no_empty_step_is_sent_while_all_requests_are_in_flight() -> None:
    core = make_core(HeldExecutor, scheduler=RECORDING, parallel=PIPELINE)
    core.add_request(request("a", [1, 2], 2))
    core.step_fn()
    calls.clear()
    core.executor.release()
    (output,) = core.step_fn()
    assert output.request_id == "a"
    assert [call.split()[0] for call in calls] == ["update"]


def test_aborts_that_arrive_during_a_step_are_applied_before_its_update() -> None:
    config = make_config(scheduler=RECORDING)
    aborts: list[str] = []
    core = EngineCore(
        config, FakeExecutor(config, "instance", lambda: None), take_aborts=lambda: aborts
    )
    core.add_request(request("r", [1, 2]))
    calls.clear()
    aborts.append("r")
    (output,) = core.step()
    assert output.finish_reason is FinishReason.ABORT
    assert output.new_token_ids == []
    assert calls.index("abort r") < next(
        i for i, call in enumerate(calls) if call.startswith("update")
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": PIPELINE},
        {"scheduler": SchedulerConfig(async_scheduling=True)},
        {"scheduler": SchedulerConfig(async_scheduling=True, max_num_batched_tokens=5)},
    ],
    ids=["one by one", "pipeline", "asynchronous", "asynchronous in chunks"],
)
def test_text_does_not_depend_on_how_steps_overlap(sections) -> None:
    core = make_core(**sections)
    prompts = {f"r{i}": list(range(1, 2 + 3 * i)) for i in range(6)}
    texts = generate(
        core, *(request(name, prompt, 4 + len(name)) for name, prompt in prompts.items())
    )
    assert texts == {
        name: continuation(prompt, 4 + len(name), ignore_eos=True)
        for name, prompt in prompts.items()
    }
    assert core.get_stats().kv_cache_usage == 0


def test_a_worker_that_dies_ends_the_wait_for_its_step() -> None:
    core = make_core(HeldExecutor)
    core.add_request(request("r", [1, 2]))
    core.executor.failure_callback("worker 1 was killed")
    with pytest.raises(StepFailedError, match="worker 1 was killed"):
        core.step_fn()


def test_profiling_without_a_folder_names_the_flag_to_set(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="--profiler-dir"):
        make_core().start_profile()
    core = make_core(observability=ObservabilityConfig(profiler_dir=str(tmp_path)))
    core.start_profile()
    core.stop_profile()
    assert core.executor.calls == [("start_profile",), ("stop_profile",)]
