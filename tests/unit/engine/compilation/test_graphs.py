"""Steps with CUDA graphs give the tokens of eager steps. Only the graphs are fake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import LLM, SamplingParams
from baton_engine.compilation.graphs import CudaGraphs
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.forward import forward_runner
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import CompilationConfig, EngineConfig, ModelConfig
from support.engine.fake_gpu import RecordedRuns

PROMPTS = [
    [3 + (7 * i + j) % 290 for j in range(length)] for i, length in enumerate((1, 5, 17, 30, 2))
]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "vocab_size": 300}


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("graphs") / request.param, request.param, **SMALL
    )


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> RecordedRuns:
    runs = RecordedRuns()
    monkeypatch.setattr("baton_engine.worker.loaded_model.graph_backend", lambda device: runs)
    return runs


def generate(
    checkpoint: Path, between: Callable[[LLM], None] | None = None, **options: Any
) -> list[list[int]]:
    """Generate from the same prompts twice and call `between` after the first time.

    Returns:
        The tokens of all outputs.
    """
    llm = LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=12,
        max_num_seqs=4,
        num_blocks=12,
        block_size=4,
        max_model_len=44,
        enable_prefix_caching=False,
        **options,
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        first = llm.generate(PROMPTS, params, use_tqdm=False)
        if between is not None:
            between(llm)
        again = llm.generate(PROMPTS, params, use_tqdm=False)
    finally:
        llm.close()
    return [list(output.outputs[0].token_ids) for output in (*first, *again)]


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> list[list[int]]:
    return generate(checkpoint, enforce_eager=True)


@pytest.mark.parametrize("mode", ["piecewise", "full", "full_decode_only", "full_and_piecewise"])
def test_chunks_decodes_and_preemption_with_graphs_give_the_tokens_of_eager_steps(
    checkpoint: Path,
    eager: list[list[int]],
    double: RecordedRuns,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    # At this level, replays check that their arguments have the addresses of the capture.
    caplog.set_level(logging.DEBUG, "baton_engine.compilation.graphs")
    assert (
        generate(
            checkpoint, compilation_mode="eager", cudagraph_mode=mode, capture_sizes=[1, 3, 8, 12]
        )
        == eager
    )
    assert double.num_replays > 20


def test_graphs_are_captured_again_at_wake_up(
    checkpoint: Path, eager: list[list[int]], double: RecordedRuns
) -> None:
    captured = []

    def sleep_and_wake_up(llm: LLM) -> None:
        for level in (1, 2):
            captured.append(double.num_captures)
            llm.sleep(level)
            llm.wake_up()
        captured.append(double.num_captures)

    options = {
        "compilation_mode": "eager",
        "cudagraph_mode": "full_and_piecewise",
        "capture_sizes": [2, 4, 12],
    }
    assert generate(checkpoint, sleep_and_wake_up, **options) == eager
    assert captured == [captured[0] * n for n in (1, 2, 3)]


def test_steps_larger_than_every_graph_run_without_a_graph(
    checkpoint: Path, eager: list[list[int]], double: RecordedRuns
) -> None:
    assert (
        generate(checkpoint, compilation_mode="none", cudagraph_mode="full", capture_sizes=[2])
        == eager
    )
    # Two tokens of two sequences, and two tokens of one or two sequences with chunks.
    assert double.num_captures == 2


def test_wake_up_of_an_engine_that_is_awake_captures_no_graphs(
    checkpoint: Path, eager: list[list[int]], double: RecordedRuns
) -> None:
    captured = []

    def wake(llm: LLM) -> None:
        captured.append(double.num_captures)
        llm.wake_up()
        captured.append(double.num_captures)

    assert (
        generate(
            checkpoint, wake, compilation_mode="none", cudagraph_mode="full", capture_sizes=[4]
        )
        == eager
    )
    assert captured[0] == captured[1] > 0


def test_compilation_without_graphs_and_sizes_gives_the_tokens_of_eager_steps(
    checkpoint: Path, eager: list[list[int]]
) -> None:
    assert generate(checkpoint, compilation_mode="eager", cudagraph_mode="none") == eager


def test_the_first_trace_uses_the_largest_step_if_it_exceeds_32_bit_indices(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[int] = []

    def compile_nothing(model: Any, backend: object) -> Callable[..., torch.Tensor]:
        def forward(input_ids: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            traced.append(len(input_ids))
            return model(input_ids, *more)

        return forward

    monkeypatch.setattr(forward_runner, "compile_model", compile_nothing)
    # The model's widest layer has more than 64 outputs.
    for largest in (forward_runner.INT32_MAX, 12 * 64 - 1):
        monkeypatch.setattr(forward_runner, "INT32_MAX", largest)
        traced.clear()
        generate(checkpoint, compilation_mode="eager", cudagraph_mode="none")
        assert traced[0] == (2 if largest > 12 * 64 else 12)


def test_the_memory_of_all_graphs_is_estimated_from_the_two_largest(
    checkpoint: Path, double: RecordedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = CompilationConfig(mode="none", capture_sizes=(1, 2, 8, 12))
    config = EngineConfig(
        model=ModelConfig(path=str(checkpoint)),
        compilation=compilation,
        device="cpu",
        num_threads=1,
    )
    runner = ModelRunner(config)
    runner.load_model()
    forward = runner.loaded.forward
    monkeypatch.setattr(forward, "_free_bytes", lambda: 1000 - 10 * double.num_captures)
    assert forward.estimate_graph_bytes(runner.allocate_kv_cache(2)) == 4 * 10
    assert double.num_captures == 2
    assert forward.num_graphs == 0


def test_a_failed_capture_raises_its_cause_and_captures_outside_inference_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Graph:
        def capture_begin(self, **options: object) -> None:
            assert not torch.is_inference_mode_enabled(), (
                "graphs of others would share tensors of inference mode"
            )

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def run() -> None:
        assert torch.is_inference_mode_enabled()
        raise ValueError("this waits for the device")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    with torch.inference_mode(), pytest.raises(ValueError, match="waits for the device"):
        CudaGraphs(torch.device("cuda")).capture(run)


def test_enforce_eager_disables_compilation_and_graphs(
    checkpoint: Path, eager: list[list[int]], double: RecordedRuns
) -> None:
    options = {"compilation_mode": "inductor", "cudagraph_mode": "full"}
    assert generate(checkpoint, enforce_eager=True, **options) == eager
    assert double.num_captures == 0


def test_a_failed_capture_is_an_error_only_if_graphs_are_configured(
    checkpoint: Path,
    eager: list[list[int]],
    double: RecordedRuns,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(run: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(double, "capture", fail)
    assert generate(checkpoint, compilation_mode="none") == eager
    assert "CUDA graphs could not be captured" in caplog.text
    with pytest.raises(Exception, match="not permitted when stream is capturing"):
        generate(checkpoint, compilation_mode="none", cudagraph_mode="full_decode_only")


def test_without_a_gpu_steps_run_without_graphs_and_a_warning_is_logged(
    checkpoint: Path, eager: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert generate(checkpoint, cudagraph_mode="full") == eager
    assert "CUDA graphs need a GPU" in caplog.text
