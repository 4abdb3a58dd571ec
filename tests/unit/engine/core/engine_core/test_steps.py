"""The order of calls in a step, several steps in flight, aborts during a step, and failed steps."""

from __future__ import annotations

import json
import logging
import re
import socket
import stat
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.step_records import StepFailedError
from baton_engine.executor.base import ModelInfo
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.models.errors import ConfigurationError
from baton_engine.scheduling.scheduler import Scheduler
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
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


def make_config(**sections: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": ModelConfig(path="/nowhere"),
        "cache": CacheConfig(block_size=4, num_blocks=64),
    }
    return EngineConfig(**{**defaults, **sections})  # type: ignore[arg-type]


def make_core(executor_class: type[FakeExecutor] = FakeExecutor, **sections: object) -> EngineCore:
    config = make_config(**sections)
    return EngineCore(config, executor_class(config, "instance", lambda: None))


def request(request_id: str, prompt: list[int], max_tokens: int = 6) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


def generate(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    for one in requests:
        assert core.add_request(one) is None
    texts: dict[str, list[int]] = {one.request_id: [] for one in requests}
    while core.has_requests:
        for output in core.step_fn():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            texts[output.request_id] += output.new_token_ids
    return texts


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


def test_a_failed_step_writes_its_input_to_a_file(tmp_path) -> None:
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path / "dumps")))
    generate(core, request("before", [1, 2], 2))
    long = EngineCoreRequest("long", list(range(1, 101)), SamplingParams(max_tokens=2))
    core.add_request(long)
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(
        StepFailedError, match="RuntimeError: the device is on fire; the crash dump is"
    ) as failed:
        core.step_fn()
    (path,) = (tmp_path / "dumps").iterdir()
    assert socket.gethostname() in path.name, "pods that share the folder would use equal names"
    assert str(path) in str(failed.value)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dump = json.loads(path.read_text())
    assert dump["error"][-1] == "RuntimeError: the device is on fire"
    assert dump["step"]["num_scheduled_tokens"] == {"long": 100, "bad": 3}
    new = {one["request_id"]: one for one in dump["step"]["new_requests"]}
    assert new["bad"]["prompt_token_ids"] == "3 left out"
    assert new["long"]["prompt_token_ids"] == "100 left out"
    assert new["bad"]["sampling_params"]["max_tokens"] == 6
    assert dump["stats"]["num_requests_running"] == 2
    assert dump["config"]["cache"]["num_blocks"] == 64


def test_a_crash_dump_is_written_to_the_volume_of_a_pod_of_the_local_cluster(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    (tmp_path / "dumps").mkdir()
    core = make_core(observability=ObservabilityConfig(crash_dump_dir="/dumps"))
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(StepFailedError, match="the crash dump is"):
        core.step_fn()
    assert len(list((tmp_path / "dumps").iterdir())) == 1


def test_a_scheduling_failure_writes_the_engine_state_to_a_file(tmp_path, monkeypatch) -> None:
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path)))
    core.add_request(request("r", [1, 2]))
    monkeypatch.setattr(core.scheduler.state.kv, "allocate", lambda *args, **options: 1 / 0)
    with pytest.raises(
        StepFailedError, match=r"scheduling failed: ZeroDivisionError: .*; the crash dump is"
    ):
        core.step_fn()
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["step"] is None
    assert dump["stats"]["num_requests_waiting"] == 1


def test_a_failed_crash_dump_does_not_hide_the_error_of_the_step(tmp_path) -> None:
    (tmp_path / "file").touch()
    core = make_core(observability=ObservabilityConfig(crash_dump_dir=str(tmp_path / "file")))
    core.add_request(request("bad", [13, 13, 13]))
    with pytest.raises(StepFailedError, match=r"the device is on fire$"):
        core.step_fn()


def test_a_worker_that_dies_ends_the_wait_for_its_step() -> None:
    core = make_core(HeldExecutor)
    core.add_request(request("r", [1, 2]))
    core.executor.failure_callback("worker 1 was killed")
    with pytest.raises(StepFailedError, match="worker 1 was killed"):
        core.step_fn()


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


def test_max_model_len_is_fitted_to_the_kv_memory_unless_it_is_configured(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_core().ready.max_model_len == 256
    assert "256 tokens, limited by the KV memory; the model's maximum is 512" in caplog.text
    assert make_core(cache=CacheConfig(block_size=4, num_blocks=500)).ready.max_model_len == 512
    long = make_core(
        model=ModelConfig(path="/nowhere", max_model_len=1000),
        cache=CacheConfig(block_size=4, num_blocks=500),
    )
    assert long.ready.max_model_len == 1000, "the workers compare it with the model's maximum"
    with pytest.raises(
        ConfigurationError,
        match=r"model\.max_model_len is 300 .* holds 256 .*raise cache\.memory_bytes",
    ):
        make_core(model=ModelConfig(path="/nowhere", max_model_len=300))


def test_a_scheduler_class_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"scheduler\.scheduler_class: cannot load scheduler nowhere\.Nothing",
    ):
        make_core(scheduler=SchedulerConfig(scheduler_class="nowhere.Nothing"))


def test_an_unknown_short_name_of_a_scheduler_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cannot load scheduler 'nope': it is neither a known name"
    ):
        make_core(scheduler=SchedulerConfig(scheduler_class="nope"))


def test_iterations_are_logged_on_request(caplog) -> None:
    with caplog.at_level(logging.INFO):
        generate(
            make_core(observability=ObservabilityConfig(log_iterations=True)),
            request("r", [1, 2, 3], 2),
        )
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")
    ]
    assert re.search(
        r"3 prefill tokens of 1 requests, 0 decode tokens; 1 running, 0 waiting, .*model \d",
        lines[0],
    )
    assert "0 prefill tokens of 0 requests, 1 decode tokens" in lines[1]


def test_the_last_chunk_of_a_prompt_is_logged_as_a_prefill_even_with_one_token(caplog) -> None:
    with caplog.at_level(logging.INFO):
        generate(
            make_core(
                observability=ObservabilityConfig(log_iterations=True),
                scheduler=SchedulerConfig(max_num_batched_tokens=2, max_num_seqs=2),
            ),
            request("r", [1, 2, 3], 2),
        )
    assert re.findall(r"(\d+) prefill tokens of (\d+) requests, (\d+) decode", caplog.text) == [
        ("2", "1", "0"),
        ("1", "1", "0"),
        ("0", "0", "1"),
    ]


def test_profiling_without_a_folder_names_the_flag_to_set(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="--profiler-dir"):
        make_core().start_profile()
    core = make_core(observability=ObservabilityConfig(profiler_dir=str(tmp_path)))
    core.start_profile()
    core.stop_profile()
    assert core.executor.calls == [("start_profile",), ("stop_profile",)]
