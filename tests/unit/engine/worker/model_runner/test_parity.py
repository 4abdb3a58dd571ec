"""ModelRunner against transformers: chunks, mixed batches, resumed requests, and its settings."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton_engine.executor.step import CachedRequestData, SchedulerOutput
from baton_engine.models.errors import ConfigurationError, ModelNotFound
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from baton_engine.worker.devices import check_quantization
from baton_engine.worker.model_runner import ModelRunner
from baton_kv_transfer.memory.layout import explain_layout_mismatch
from baton_protocol.kv_compatibility import differences
from baton_protocol.options.config import QUANTIZATIONS, CacheConfig, EngineConfig, ModelConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.step_driver import (
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
    random_prompts,
)
from support.parity import TIE, reference_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        arch: create_checkpoint(
            root / arch,
            arch,
            hidden_size=64,
            intermediate_size=96,
            num_layers=3,
            vocab_size=VOCAB_SIZE,
            seed=7,
        )
        for arch in ARCHITECTURES
    }


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> ModelRunner:
    return make_runner(checkpoints["llama"])


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, request: Request) -> torch.Tensor:
    """Return the logits at every position of the prompt and the generated tokens."""
    return model(torch.tensor([request.prompt + request.generated])).logits[0]


def assert_greedy(path: Path, requests: list[Request]) -> None:
    """Check that each token is the reference's best, or as good, after the same tokens."""
    model = reference_model(path)
    for request in requests:
        logits = reference_logits(model, request)
        for index, token_id in enumerate(request.generated):
            row = logits[len(request.prompt) + index - 1]
            gap = float(row.max() - row[token_id])
            assert gap <= TIE, (
                f"{request.request_id}, token {index}: {gap:.4f} below the reference's best"
            )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_match_transformers(arch: str, checkpoints: dict[str, Path]) -> None:
    """Prompts of one token to several blocks run in random chunks of mixed batches."""
    runner = make_runner(checkpoints[arch])
    lengths = [1, 2, 15, 16, 17, 31, 48, 77, 5, 100]
    requests = [
        Request(f"{arch}-{n}", prompt, max_tokens=20)
        for n, prompt in enumerate(random_prompts(lengths))
    ]
    StepDriver(runner, seed=1).run(requests, max_chunk=24, join_probability=0.4)
    assert_greedy(checkpoints[arch], requests)
    assert len({tuple(r.generated) for r in requests}) == len(requests), (
        "the model ignores its prompt"
    )


def test_greedy_tokens_match_transformers_for_a_tied_sharded_and_rope_scaled_checkpoint(
    tmp_path: Path,
) -> None:
    path = create_checkpoint(
        tmp_path / "model", "llama", tie_word_embeddings=True, max_shard_size=100_000
    )
    assert len(list(path.glob("model-*.safetensors"))) > 2
    config = json.loads((path / "config.json").read_text())
    del config["rope_theta"]
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (path / "config.json").write_text(json.dumps(config))
    requests = [
        Request(f"tied-{n}", prompt, max_tokens=10)
        for n, prompt in enumerate(random_prompts([3, 130]))
    ]
    StepDriver(make_runner(path)).run(requests, max_chunk=50)
    assert_greedy(path, requests)


def test_output_does_not_depend_on_chunk_sizes_or_other_requests(llama: ModelRunner) -> None:
    runs = []
    for seed, max_chunk, together in [(0, 200, False), (1, 7, True), (2, 33, True)]:
        requests = [
            Request(f"c{seed}-{n}", p, max_tokens=12)
            for n, p in enumerate(random_prompts([40, 9, 70]))
        ]
        driver = StepDriver(llama, seed=seed)
        for group in [requests] if together else [[r] for r in requests]:
            driver.run(group, max_chunk=max_chunk)
        driver.step([], max_chunk)  # removes the ended requests from the worker
        runs.append([r.generated for r in requests])
    assert runs[0] == runs[1] == runs[2]


def test_a_preempted_request_continues_with_the_same_tokens(llama: ModelRunner) -> None:
    prompt = random_prompt(37)
    whole = Request("whole", prompt, max_tokens=16)
    driver = StepDriver(llama)
    driver.run([whole])
    first = Request("again", prompt, max_tokens=7)
    # Its end releases the blocks, as a preemption does.
    driver.run([first])
    second = Request("again", prompt, max_tokens=16, generated=first.generated)
    driver.run([second])
    assert second.generated == whole.generated


def test_a_request_starts_after_the_tokens_whose_kv_another_request_computed(
    llama: ModelRunner,
) -> None:
    """This is what happens after a prefix-cache hit or a KV transfer."""
    prompt = random_prompt(50, seed=3)
    driver = StepDriver(llama)
    donor = Request("donor", prompt, max_tokens=5)
    while not donor.done:
        driver.step([donor], max_chunk=64)
    reader = Request("reader", prompt, max_tokens=5, block_ids=donor.block_ids[:3], num_computed=48)
    while not reader.done:
        driver.step([reader, donor] if not donor.done else [reader], max_chunk=64)
    assert reader.generated == donor.generated
    for request in (donor, reader):
        driver.finished.append(request.request_id)
    driver.step([], max_chunk=1)


def test_another_worker_continues_a_seeded_request_with_the_same_tokens(
    checkpoints: dict[str, Path], llama: ModelRunner
) -> None:
    """The second worker receives the prompt and the generated tokens; penalties count both."""
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, frequency_penalty=0.5, repetition_penalty=1.2
    )
    prompt = random_prompt(20, seed=4)
    driver = StepDriver(llama)
    whole = Request("whole", prompt, max_tokens=14, params=params)
    start = Request("start", prompt, max_tokens=6, params=params)
    driver.run([whole, start])
    driver.step([], max_chunk=1)
    moved = Request("moved", prompt, max_tokens=14, params=params, generated=list(start.generated))
    StepDriver(make_runner(checkpoints["llama"]), seed=5).run([moved])
    assert moved.generated == whole.generated
    assert len(set(whole.generated)) > 1


def test_logprobs_match_transformers(checkpoints: dict[str, Path], llama: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=2, logprobs=3)
    request = Request("logprobs", random_prompt(18, seed=5), max_tokens=4, params=params)
    driver = StepDriver(llama)
    driver.run([request])
    driver.step([], max_chunk=1)
    model = reference_model(checkpoints["llama"])
    expected = reference_logits(model, request).log_softmax(-1)
    for index, reported in enumerate(request.logprobs):
        row = expected[len(request.prompt) + index - 1]
        assert reported.token_id == request.generated[index]
        assert reported.logprob == pytest.approx(float(row[reported.token_id]), abs=1e-3)
        values, ids = row.topk(3)
        assert [token for token, _ in reported.top] == ids.tolist()
        assert [value for _, value in reported.top] == pytest.approx(values.tolist(), abs=1e-3)
    assert len(request.logprobs) == 4


def test_the_kv_cache_has_the_shape_and_size_of_its_layout(llama: ModelRunner) -> None:
    layout = llama.spec.kv_cache_layout(5)
    runner = ModelRunner(llama.config)
    kv_cache = runner.allocate_kv_cache(5)
    assert kv_cache.shape == (
        5,
        layout.num_kv_heads,
        layout.num_layers,
        2,
        layout.block_size,
        layout.head_dim,
    )
    assert kv_cache.is_contiguous()
    assert kv_cache.nbytes == 5 * layout.block_nbytes
    assert not kv_cache.any()


def test_warm_up_writes_no_kv(checkpoints: dict[str, Path]) -> None:
    runner = ModelRunner(
        EngineConfig(model=ModelConfig(path=str(checkpoints["qwen3_moe"])), device="cpu")
    )
    runner.load_model()
    kv_cache = runner.allocate_kv_cache(4)
    runner.warm_up()
    assert not kv_cache.any()


def test_rows_of_ended_requests_can_be_used_again(checkpoints: dict[str, Path]) -> None:
    """There are more requests than rows, but never more than two at a time."""
    runner = make_runner(checkpoints["qwen3"], max_num_seqs=2)
    driver = StepDriver(runner)
    outputs = []
    for round_ in range(4):
        pair = [
            Request(f"{round_}-{n}", p, max_tokens=3) for n, p in enumerate(random_prompts([6, 19]))
        ]
        driver.run(pair)
        outputs.append([r.generated for r in pair])
    assert all(output == outputs[0] for output in outputs)


def test_the_error_about_an_unknown_request_names_it(llama: ModelRunner) -> None:
    step = SchedulerOutput([], [CachedRequestData("ghost", [], 4)], {"ghost": 1}, [])
    with pytest.raises(RuntimeError, match="ghost"):
        llama.execute_model(step)


def test_the_compatibility_hash_depends_on_the_model_and_not_on_the_block_size(
    checkpoints: dict[str, Path],
) -> None:
    def hash_of(arch: str, block_size: int = 16) -> str:
        return make_runner(
            checkpoints[arch], num_blocks=1, block_size=block_size
        ).spec.compatibility_hash

    assert hash_of("llama") == hash_of("llama")
    assert hash_of("llama") != hash_of("qwen3")
    assert hash_of("llama") == hash_of("llama", block_size=32)


def test_the_compatibility_hash_depends_on_the_quantization(checkpoints: dict[str, Path]) -> None:
    hashes = [
        ModelRunner(
            EngineConfig(
                model=ModelConfig(path=str(checkpoints["llama"]), quantization=quantization),
                device="cpu",
            )
        ).spec.compatibility_hash
        for quantization in (None, *QUANTIZATIONS)
    ]
    assert len(set(hashes)) == 3


def test_kv_compatibility_differs_exactly_where_the_handshake_would_refuse(
    checkpoints: dict[str, Path],
) -> None:
    def runner(arch: str = "llama", block_size: int = 16, **model: Any) -> ModelRunner:
        cache = CacheConfig(block_size=block_size)
        return ModelRunner(
            EngineConfig(
                model=ModelConfig(path=str(checkpoints[arch]), **model), cache=cache, device="cpu"
            )
        )

    runners = [
        runner(),
        runner(),
        runner("qwen3"),
        runner("qwen3_moe"),
        runner(block_size=32),
        runner(quantization="int8"),
        runner(dtype="float32"),
        runner(dtype="bfloat16"),
    ]
    specs = [runner.spec for runner in runners]
    for ours, theirs in itertools.product(specs, specs):
        refused = ours.compatibility_hash != theirs.compatibility_hash or explain_layout_mismatch(
            ours.kv_cache_layout(1), theirs.kv_cache_layout(1)
        )
        assert bool(refused) == bool(
            differences(ours.kv_compatibility(2), theirs.kv_compatibility(2), "here", "there")
        )
    assert "version" in differences(
        specs[0].kv_compatibility(2), specs[1].kv_compatibility(3), "here", "there"
    )


def test_the_compatibility_hash_depends_on_the_weights(tmp_path: Path) -> None:
    for seed in (1, 2):
        create_checkpoint(tmp_path / str(seed), "llama", seed=seed)
    runners = [make_runner(tmp_path / str(seed), num_blocks=1) for seed in (1, 2)]
    hashes = {runner.spec.compatibility_hash for runner in runners}
    assert len(hashes) == 2


def test_a_missing_model_and_invalid_settings_are_refused(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(ModelNotFound, match="nowhere does not exist"):
        ModelRunner(EngineConfig(model=ModelConfig(path=str(tmp_path / "nowhere")))).load_model()
    too_long = ModelConfig(path=str(checkpoints["llama"]), max_model_len=10**6)
    with pytest.raises(
        ConfigurationError,
        match=r"model\.max_model_len must be in \[1, \d+\] for this model, got 1000000",
    ) as refused:
        ModelRunner(EngineConfig(model=too_long)).load_model()
    assert refused.value.reason == "InvalidConfig"
    with pytest.raises(
        ConfigurationError, match="quantization must be int8 or int4, or not given, got 'int3'"
    ):
        ModelRunner(
            EngineConfig(model=ModelConfig(path=str(checkpoints["llama"]), quantization="int3"))
        )
    with pytest.raises(
        ConfigurationError, match="quantization int8 is for CPUs, but the model runs on cuda"
    ):
        check_quantization("int8", torch.device("cuda"))


@pytest.mark.parametrize(
    ("checkpoint_dtype", "capabilities", "expected"),
    [
        ("bfloat16", {"avx512_bf16": True}, torch.bfloat16),
        ("bfloat16", {"avx512_f": True}, torch.float32),
        ("float16", {"avx512_bf16": True}, torch.float32),
        ("bfloat16", {"amx_bf16": True}, torch.bfloat16),
        ("float16", {"avx512_fp16": True}, torch.float16),
        ("float32", {"avx512_bf16": True}, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu_is_one_with_instructions_for_it_and_the_log_has_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint_dtype: str,
    capabilities: dict[str, bool],
    expected: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = create_checkpoint(
        tmp_path / "model", "llama", num_layers=1, vocab_size=300, dtype=checkpoint_dtype
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    runner = ModelRunner(EngineConfig(model=ModelConfig(path=str(path)), device="cpu"))
    with caplog.at_level("INFO"):
        assert runner.spec.dtype is expected
    reason = (
        next(iter(capabilities))
        if checkpoint_dtype == str(expected)[6:] != "float32"
        else checkpoint_dtype
    )
    assert len(caplog.records) == 1
    assert f"dtype {expected}".replace("torch.", "") in caplog.text
    assert reason in caplog.text
    assert f"torch.{runner.spec.kv_cache_layout(1).dtype}" == str(expected)


def test_logprobs_in_bfloat16_are_close_to_float32(
    checkpoints: dict[str, Path], llama: ModelRunner
) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    values = []
    for runner in (llama, make_runner(checkpoints["llama"], dtype="bfloat16")):
        request = Request("bf16", random_prompt(30, seed=6), max_tokens=1, params=params)
        driver = StepDriver(runner)
        driver.run([request])
        driver.step([], max_chunk=1)
        values.append(request.logprobs[0].logprob)
    assert np.isfinite(values).all()
    assert values[0] == pytest.approx(values[1], abs=0.5)
