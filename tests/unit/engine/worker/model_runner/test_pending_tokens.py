"""Steps whose sampled tokens reach the host late, as on a GPU with asynchronous scheduling."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, PendingOutput
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker import model_spec
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.sleep import sleep
from baton_protocol.options.config import ObservabilityConfig, ParallelConfig, SchedulerConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.fake_gpu import NOT_COPIED, defer_tokens
from support.engine.step_driver import (
    GREEDY,
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
    random_prompts,
    runner_config,
)

pytestmark = pytest.mark.usefixtures("_restore_sampled_tokens")

PARAMS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.8, top_p=0.9, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(seed=3, allowed_token_ids=list(range(50, 400)), bad_words_token_ids=[[60, 61]]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pending") / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}
    return create_checkpoint(path, "llama", seed=7, **sizes)


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    runner = make_runner(checkpoint)
    defer_tokens(runner)
    return runner


def make_requests(params: list[SamplingParams]) -> list[Request]:
    lengths = [5, 40, 17, 1, 28, 9]
    return [
        Request(f"r{n}", prompt, 10 + n, params[n % len(params)])
        for n, prompt in enumerate(random_prompts(lengths))
    ]


@pytest.mark.parametrize(
    "params", [PARAMS[:1], PARAMS[1:2], PARAMS], ids=["plain", "random", "all"]
)
def test_steps_that_run_before_their_tokens_are_on_the_host_generate_the_same(
    checkpoint: Path, runner: ModelRunner, params: list[SamplingParams]
) -> None:
    expected, late = make_requests(params), make_requests(params)
    StepDriver(make_runner(checkpoint)).run(expected)
    StepDriver(runner, seed=1).run_ahead(late)
    assert [r.generated for r in late] == [r.generated for r in expected]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, top_k=5)])
def test_a_request_without_a_possible_token_ends_when_its_tokens_are_on_the_host(
    runner: ModelRunner, params: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    driver = StepDriver(runner)
    sound, poisoned = (
        Request(name, random_prompt(20, seed), 9, params)
        for seed, name in enumerate(("sound", "poisoned"))
    )
    while unfinished := [r for r in (sound, poisoned) if not r.generated]:
        driver.step(unfinished, 50)
    _, kv = runner._ready()
    kv.cache[poisoned.block_ids[0]] = float("nan")
    runner.execute_model(driver._schedule([sound, poisoned], 1).output)
    pending = runner.sample_tokens(None)
    assert isinstance(pending, PendingOutput)
    assert not caplog.records
    tokens = pending.result().sampled_token_ids
    assert tokens["poisoned"] in runner.spec.model_config.eos_token_ids
    assert "request poisoned is ended" in caplog.text
    assert "sound" not in caplog.text


@pytest.mark.parametrize(
    ("prompt", "reports"),
    [([4], {"logprobs": 0}), ([4, 5], {"prompt_logprobs": 1}), ([4], {"beam_width": 2})],
    ids=["logprobs", "prompt logprobs", "beams"],
)
def test_a_step_with_other_reports_has_its_tokens_at_once(
    runner: ModelRunner, prompt: list[int], reports: dict[str, int]
) -> None:
    driver = StepDriver(runner)
    params = SamplingParams(temperature=0.0, **reports)
    requests = [Request("plain", [3], 4), Request("other", prompt, 4, params)]
    runner.execute_model(driver._schedule(requests, 1).output)
    output = runner.sample_tokens(None)
    assert isinstance(output, ModelRunnerOutput)
    assert "other" in (output.logprobs | output.prompt_logprobs)
    assert output.sampled_token_ids["plain"] != NOT_COPIED


def test_a_step_with_counted_nans_has_its_tokens_at_once(runner: ModelRunner) -> None:
    runner.config = msgspec.structs.replace(
        runner.config, observability=ObservabilityConfig(count_nans_in_logits=True)
    )
    runner.execute_model(StepDriver(runner)._schedule([Request("r", [3], 4)], 1).output)
    output = runner.sample_tokens(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.num_nans_in_logits == {"r": 0}


def test_a_step_with_a_grammar_has_its_tokens_at_once(runner: ModelRunner) -> None:
    driver = StepDriver(runner)
    request = Request("bound", [3], 4)
    everything = GrammarOutput(["bound"], np.full((1, VOCAB_SIZE // 32), -1, dtype=np.int32))
    for grammar, kind in ((everything, ModelRunnerOutput), (None, PendingOutput)):
        step = driver._schedule([request], 1)
        runner.execute_model(step.output)
        step.result = runner.sample_tokens(grammar)
        assert isinstance(step.result, kind)
        driver._finish(step)


def test_a_sleep_waits_for_the_tokens(runner: ModelRunner) -> None:
    """The device may still read the weights and the KV cache."""
    driver = StepDriver(runner)
    runner.execute_model(driver._schedule([Request("r", [3], 4)], 1).output)
    pending = runner.sample_tokens(None)
    assert isinstance(pending, PendingOutput)
    sleep(runner, 1)
    [row] = runner._input_batch.rows(["r"])
    assert runner._input_batch.token_ids[row, 1] == pending.result().sampled_token_ids["r"]


@pytest.mark.parametrize(
    ("device", "asynchronous", "stages", "defers"),
    [
        ("cuda", True, 1, True),
        ("cuda", True, 2, False),
        ("cuda", False, 1, False),
        ("cpu", True, 1, False),
    ],
)
def test_tokens_are_deferred_on_a_gpu_with_asynchronous_scheduling_of_one_stage(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    asynchronous: bool,
    stages: int,
    defers: bool,
) -> None:
    monkeypatch.setattr(model_spec, "resolve_device", lambda name: torch.device(device))
    config = msgspec.structs.replace(
        runner_config(checkpoint),
        scheduler=SchedulerConfig(async_scheduling=asynchronous),
        parallel=ParallelConfig(pipeline_parallel_size=stages),
    )
    assert ModelRunner(config)._defers_tokens is defers
