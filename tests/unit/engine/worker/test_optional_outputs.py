"""The runner's reports besides tokens: prompt logprobs, NaNs in logits and routed experts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker import optional_outputs
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import ObservabilityConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.step_driver import (
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
    runner_config,
)
from support.parity import reference_model

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts model, since only those report routed experts."""
    path = tmp_path_factory.mktemp("reports") / "qwen3_moe"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": NUM_LAYERS,
        "vocab_size": VOCAB_SIZE,
    }
    return create_checkpoint(path, "qwen3_moe", seed=3, **sizes)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return make_runner(checkpoint)


def run(runner: ModelRunner, *requests: Request, max_chunk: int) -> None:
    driver = StepDriver(runner)
    driver.run(requests, max_chunk)
    driver.step([], 1)


@pytest.mark.parametrize("max_chunk", [1, 7, 100])
@pytest.mark.parametrize("slice_rows", [1, 3, 1000])
def test_prompt_logprobs_match_transformers_for_any_chunk_and_slice_size(
    checkpoint: Path,
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    max_chunk: int,
    slice_rows: int,
) -> None:
    """Another request in the batch does not ask for them and gets none."""
    monkeypatch.setattr(optional_outputs, "MAX_LOGITS_BYTES", slice_rows * VOCAB_SIZE * 4)
    prompt = random_prompt(23)
    reported = Request("reported", prompt, 3, SamplingParams(temperature=0.0, prompt_logprobs=2))
    unreported = Request("unreported", random_prompt(30, seed=1), 3)
    run(runner, unreported, reported, max_chunk=max_chunk)
    assert unreported.prompt_logprobs == []
    model = reference_model(checkpoint)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [entry.token_id for entry in reported.prompt_logprobs] == prompt[1:]
    for position, entry in enumerate(reported.prompt_logprobs):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()


def test_a_prompt_of_one_token_has_no_logprobs(runner: ModelRunner) -> None:
    reported = Request(
        "reported", random_prompt(1), 2, SamplingParams(temperature=0.0, prompt_logprobs=0)
    )
    run(runner, reported, max_chunk=9)
    assert reported.prompt_logprobs == []
    assert len(reported.generated) == 2


@pytest.mark.parametrize("max_chunk", [1, 5, 100])
def test_routed_experts_match_transformers(
    checkpoint: Path, runner: ModelRunner, max_chunk: int
) -> None:
    reported = Request(
        "reported",
        random_prompt(21, seed=2),
        4,
        SamplingParams(temperature=0.0, return_routed_experts=True),
    )
    unreported = Request("unreported", random_prompt(11, seed=3), 4)
    run(runner, unreported, reported, max_chunk=max_chunk)
    assert unreported.routed_experts == []
    found = np.concatenate(
        [
            np.frombuffer(part.expert_ids, dtype="<u2").reshape(part.shape)
            for part in reported.routed_experts
        ]
    )
    ran = reported.prompt + reported.generated[:-1]  # the last token is sampled, not run
    model = reference_model(checkpoint)
    with torch.inference_mode():
        routers = model(torch.tensor([ran]), output_router_logits=True).router_logits
    expected = torch.stack([logits.topk(found.shape[2]).indices for logits in routers], dim=1)
    assert found.shape == (len(ran), NUM_LAYERS, 2)
    assert (np.sort(found, axis=2) == expected.sort(dim=2).values.numpy()).all()


def test_a_request_with_nans_in_its_logits_ends_and_the_nans_are_counted(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other request of the batch continues. The count must be enabled."""
    config = msgspec.structs.replace(
        runner_config(checkpoint), observability=ObservabilityConfig(count_nans_in_logits=True)
    )
    runner = ModelRunner(config)
    runner.load_model()
    kv_cache = runner.allocate_kv_cache(16)
    driver = StepDriver(runner, num_blocks=16)
    sound, poisoned = (
        Request("sound", random_prompt(20), 9),
        Request("poisoned", random_prompt(20, seed=1), 9),
    )
    while not (sound.generated and poisoned.generated):
        driver.step([r for r in (sound, poisoned) if not r.generated], 50)
    kv_cache[poisoned.block_ids[0]] = float("nan")
    step = driver._schedule([sound, poisoned], 1).output
    runner.execute_model(step)
    result = runner.sample_tokens(None)
    assert result.num_nans_in_logits == {"sound": 0, "poisoned": VOCAB_SIZE}
    assert result.sampled_token_ids["poisoned"] in runner.spec.model_config.eos_token_ids
    assert "request poisoned is ended" in caplog.text
