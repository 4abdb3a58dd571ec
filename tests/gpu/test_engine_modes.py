"""The engine generates the CPU's tokens on a GPU: eager, with CUDA graphs and compiled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton_engine import LLM, SamplingParams
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol import sampling_params
from baton_protocol.options.config import CompilationConfig, SchedulerConfig
from support.engine.step_driver import Request, StepDriver, runner_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB_SIZE = 512
NUM_TOKENS = 24
PROMPTS = [
    [3 + (7 * i + 3 * j) % (VOCAB_SIZE - 3) for j in range(n)]
    for i, n in enumerate((1, 2, 15, 16, 17, 33, 70, 90, 5, 48))
]
#: The order of two log-probabilities this close depends on the order of summation.
TIE = 1e-3
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "decode-graphs": {"compilation_mode": "none", "cudagraph_mode": "full_decode_only"},
    "full-graphs": {"compilation_mode": "none", "cudagraph_mode": "full"},
    "piecewise-graphs": {"compilation_mode": "eager", "cudagraph_mode": "piecewise"},
    "compiled": {"compilation_mode": "inductor", "cudagraph_mode": "none", "compile_sizes": [1, 8]},
    "compiled-graphs": {"compilation_mode": "inductor", "cudagraph_mode": "full_and_piecewise"},
    "compiled-graphs-ahead": {
        "compilation_mode": "inductor",
        "cudagraph_mode": "full_and_piecewise",
        "async_scheduling": True,
    },
}


@pytest.fixture(autouse=True, scope="module")
def _exact_products() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / request.param
    return create_checkpoint(path, request.param, num_layers=3, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compile-cache"))


def generate(
    checkpoint: Path, sleep: bool = False, logprobs: int | None = 2, **options: Any
) -> tuple[list[list[int]], list[list[dict[int, Any]]]]:
    """Return token ids and the log-probabilities of the best two tokens, per prompt."""
    llm = LLM(
        str(checkpoint),
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=8,
        num_blocks=24,
        max_model_len=160,
        **options,
    )
    try:
        if sleep:
            llm.generate(PROMPTS[:3], SamplingParams(max_tokens=2), use_tqdm=False)
            llm.sleep(1)
            llm.wake_up()
        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs
        )
        results = [result.outputs[0] for result in llm.generate(PROMPTS, params, use_tqdm=False)]
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
        assert metrics["baton:num_preemptions_total"] > 0, "nothing was preempted"
    finally:
        llm.close()
    return [list(result.token_ids) for result in results], [
        list(result.logprobs or []) for result in results
    ]


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> tuple[list[list[int]], list[list[dict[int, Any]]]]:
    return generate(checkpoint, device="cpu")


def assert_same(
    actual: list[list[int]], on_cpu: tuple[list[list[int]], list[list[dict[int, Any]]]]
) -> None:
    """Compare sequences. They may differ only after a tie of the two best tokens."""
    for prompt, (tokens, expected, logprobs) in enumerate(zip(actual, *on_cpu, strict=True)):
        for place, (token, best) in enumerate(zip(tokens, expected, strict=True)):
            if token != best:
                values = sorted((entry.logprob for entry in logprobs[place].values()), reverse=True)
                where = f"prompt {prompt}, token {place}: {token} instead of {best}"
                assert token in logprobs[place], where
                assert values[0] - values[1] < TIE, where
                break


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_generates_the_tokens_of_the_cpu(
    checkpoint: Path,
    on_cpu: tuple[list[list[int]], list[list[dict[int, Any]]]],
    cache_dir: str,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    # At this level the engine checks that the arguments of graphs keep their addresses.
    caplog.set_level(logging.DEBUG, "baton_engine.compilation.graphs")
    options = MODES[mode]
    # Only tokens without log-probabilities are pending while the next step is prepared.
    logprobs = None if options.get("async_scheduling") else 2
    tokens, _ = generate(
        checkpoint, logprobs=logprobs, device="cuda", compile_cache_dir=cache_dir, **options
    )
    assert_same(tokens, on_cpu)


@pytest.mark.parametrize("mode", ["full-graphs", "compiled-graphs"])
def test_graphs_generate_the_tokens_of_the_cpu_after_sleep(
    checkpoint: Path,
    on_cpu: tuple[list[list[int]], list[list[dict[int, Any]]]],
    cache_dir: str,
    mode: str,
) -> None:
    """Weights and KV may have other addresses after sleep."""
    tokens, _ = generate(
        checkpoint, sleep=True, device="cuda", compile_cache_dir=cache_dir, **MODES[mode]
    )
    assert_same(tokens, on_cpu)


@pytest.mark.parametrize(
    "kinds",
    [
        [{"temperature": 0.0}],
        [{"seed": 3}, {"seed": 4, "top_p": 0.9, "presence_penalty": 0.4}],
        [{"temperature": 0.0, "allowed_token_ids": list(range(50, 200))}, {"seed": 5, "top_k": 9}],
    ],
    ids=["greedy", "random", "mixed"],
)
def test_with_asynchronous_scheduling_the_host_waits_only_for_earlier_tokens(
    checkpoint: Path, kinds: list[dict[str, Any]]
) -> None:
    """Every other wait of the host for the GPU raises an error here."""
    generated = []
    for ahead in (False, True):
        config = msgspec.structs.replace(
            runner_config(checkpoint),
            device="cuda",
            scheduler=SchedulerConfig(async_scheduling=ahead),
            compilation=CompilationConfig(enforce_eager=True),
        )
        runner = ModelRunner(config)
        runner.load_model()
        runner.allocate_kv_cache(128)
        runner.warm_up()
        driver = StepDriver(runner, num_blocks=128)
        requests = [
            Request(
                str(n), prompt, NUM_TOKENS, sampling_params.SamplingParams(**kinds[n % len(kinds)])
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        while not all(request.generated for request in requests):
            driver.step([request for request in requests if not request.done], 32)
        torch.cuda.set_sync_debug_mode("error" if ahead else "default")
        try:
            (driver.run_ahead if ahead else driver.run)(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        generated.append([request.generated for request in requests])
    assert generated[0] == generated[1]
