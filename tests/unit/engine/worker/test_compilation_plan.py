"""What is configured and what the device can do decide together how steps run."""

from __future__ import annotations

import pytest

from baton_engine.checkpoint import create_checkpoint
from baton_engine.cli import parse_config
from baton_engine.compilation.dispatch import CudagraphMode
from baton_engine.models.checkpoint_config import CheckpointConfig, load_checkpoint_config
from baton_engine.models.errors import ConfigurationError
from baton_engine.worker.compilation_plan import CompilationPlan, plan_compilation


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointConfig]:
    folder = tmp_path_factory.mktemp("plans")
    return {
        arch: load_checkpoint_config(
            create_checkpoint(folder / arch, arch, num_layers=1, vocab_size=300)
        )
        for arch in ("llama", "qwen3_moe")
    }


def plan(model: CheckpointConfig, flags: str, *, has_graphs: bool) -> CompilationPlan:
    config, _ = parse_config(["--model", "/m", *flags.split()])
    return plan_compilation(config, model, 100, has_graphs=has_graphs)


@pytest.mark.parametrize(
    ("flags", "has_graphs", "mode", "cudagraph_mode"),
    [
        ("", True, "inductor", "FULL_AND_PIECEWISE"),
        ("", False, "none", "NONE"),
        ("--enforce-eager", True, "none", "NONE"),
        ("--enforce-eager --compilation-mode inductor --cudagraph-mode full", True, "none", "NONE"),
        ("--compilation-mode none", True, "none", "FULL_DECODE_ONLY"),
        ("--compilation-mode none --cudagraph-mode full", True, "none", "FULL"),
        ("--compilation-mode none --cudagraph-mode piecewise", True, "none", "FULL_DECODE_ONLY"),
        ("--compilation-mode eager --cudagraph-mode piecewise", True, "eager", "PIECEWISE"),
        ("--compilation-mode inductor", False, "inductor", "NONE"),
        ("--cudagraph-mode none", True, "inductor", "NONE"),
    ],
)
def test_defaults_depend_on_the_device_and_one_flag_switches_all_off(
    models: dict[str, CheckpointConfig],
    flags: str,
    has_graphs: bool,
    mode: str,
    cudagraph_mode: str,
) -> None:
    made = plan(models["llama"], flags, has_graphs=has_graphs)
    assert (made.mode, made.cudagraph_mode) == (mode, CudagraphMode[cudagraph_mode])
    assert bool(made.capture_sizes) == (made.cudagraph_mode is not CudagraphMode.NONE)


def test_enforce_eager_says_what_it_overrides(
    models: dict[str, CheckpointConfig], caplog: pytest.LogCaptureFixture
) -> None:
    plan(models["llama"], "--enforce-eager", has_graphs=True)
    assert not caplog.text
    plan(models["llama"], "--enforce-eager --compilation-mode inductor", has_graphs=True)
    assert "enforce_eager overrides the configured compilation and CUDA graphs" in caplog.text


def test_sizes_are_sorted_and_those_that_no_step_has_are_refused(
    models: dict[str, CheckpointConfig],
) -> None:
    made = plan(models["llama"], "--capture-sizes 8,2,4 --compile-sizes 16,1", has_graphs=True)
    assert (made.capture_sizes, made.compile_sizes) == ((2, 4, 8), (1, 16))
    for flags in ("--capture-sizes 1,600", "--compile-sizes 0"):
        with pytest.raises(ConfigurationError, match="max_num_batched_tokens=512"):
            plan(models["llama"], flags, has_graphs=True)


def test_experts_in_eight_bits_are_not_traced(
    models: dict[str, CheckpointConfig], caplog: pytest.LogCaptureFixture
) -> None:
    flags = "--compilation-mode inductor --quantization int8"
    assert plan(models["llama"], flags, has_graphs=False).mode == "inductor"
    assert plan(models["qwen3_moe"], flags, has_graphs=False).mode == "none"
    assert "experts with quantized weights are not traced" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--compilation-mode fast",
            r"compilation\.mode must be auto, none, eager or inductor, got 'fast'",
        ),
        (
            "--cudagraph-mode some",
            r"compilation\.cudagraph_mode must be auto, none, piecewise, .* got 'some'",
        ),
    ],
)
def test_unknown_modes_are_refused_by_name(
    models: dict[str, CheckpointConfig], flags: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(models["llama"], flags, has_graphs=True)
