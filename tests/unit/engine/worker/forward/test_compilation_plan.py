"""The compilation plan that follows from the configuration, the device and the model."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from baton_engine.cli import parse_config
from baton_engine.compilation.cudagraph_dispatcher import CudagraphMode
from baton_engine.models.checkpoint.checkpoint_config import (
    CheckpointConfig,
    load_checkpoint_config,
)
from baton_engine.models.errors import ConfigurationError
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.forward.compilation_plan import (
    CompilationPlan,
    default_capture_sizes,
    plan_compilation,
)
from baton_protocol.options.config import QUANTIZATIONS, EngineConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointConfig]:
    folder = tmp_path_factory.mktemp("plans")
    return {
        arch: load_checkpoint_config(
            create_checkpoint(folder / arch, arch, num_layers=1, vocab_size=300)
        )
        for arch in ("llama", "qwen3_moe")
    }


def plan_from_flags(model: CheckpointConfig, flags: str, *, has_graphs: bool) -> CompilationPlan:
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
        ("--cudagraph-mode full_decode_only", True, "inductor", "FULL_DECODE_ONLY"),
        ("--cudagraph-mode full_and_piecewise", True, "inductor", "FULL_AND_PIECEWISE"),
    ],
)
def test_modes_follow_from_the_flags_and_the_device(
    models: dict[str, CheckpointConfig],
    flags: str,
    has_graphs: bool,
    mode: str,
    cudagraph_mode: str,
) -> None:
    plan = plan_from_flags(models["llama"], flags, has_graphs=has_graphs)
    assert (plan.mode, plan.cudagraph_mode) == (mode, CudagraphMode[cudagraph_mode])
    assert bool(plan.capture_sizes) == (plan.cudagraph_mode is not CudagraphMode.NONE)


def test_enforce_eager_logs_a_warning_if_it_overrides_other_flags(
    models: dict[str, CheckpointConfig], caplog: pytest.LogCaptureFixture
) -> None:
    plan_from_flags(models["llama"], "--enforce-eager", has_graphs=True)
    assert not caplog.text
    plan_from_flags(models["llama"], "--enforce-eager --compilation-mode inductor", has_graphs=True)
    assert "enforce_eager is set, so compilation.mode" in caplog.text


def test_sizes_are_sorted_and_sizes_outside_the_token_budget_are_refused(
    models: dict[str, CheckpointConfig],
) -> None:
    plan = plan_from_flags(
        models["llama"], "--capture-sizes 8,2,4 --compile-sizes 16,1", has_graphs=True
    )
    assert (plan.capture_sizes, plan.compile_sizes) == ((2, 4, 8), (1, 16))
    for flags in ("--capture-sizes 1,600", "--compile-sizes 0"):
        with pytest.raises(ConfigurationError, match="max_num_batched_tokens=512"):
            plan_from_flags(models["llama"], flags, has_graphs=True)


def test_the_cache_folder_is_the_volume_of_a_pod_of_the_local_cluster(
    models: dict[str, CheckpointConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    (tmp_path / "cache").mkdir()
    plan = plan_from_flags(models["llama"], "--compile-cache-dir /cache", has_graphs=True)
    assert plan.cache_dir == tmp_path / "cache"
    assert plan_from_flags(models["llama"], "", has_graphs=True).cache_dir is None


def test_an_empty_list_of_capture_sizes_means_no_graphs(
    models: dict[str, CheckpointConfig], caplog: pytest.LogCaptureFixture
) -> None:
    for cudagraph_mode in ("auto", "full"):
        assert "capture_sizes is empty" not in caplog.text
        config = msgspec.json.decode(
            f'{{"model": {{"path": "/m"}}, "compilation": {{"capture_sizes": [], '
            f'"cudagraph_mode": "{cudagraph_mode}"}}}}',
            type=EngineConfig,
        )
        plan = plan_compilation(config, models["llama"], 100, has_graphs=True)
        assert (plan.mode, plan.cudagraph_mode) == ("inductor", CudagraphMode.NONE)
        assert plan.capture_sizes == ()
    assert "cudagraph_mode FULL is ignored, because compilation.capture_sizes" in caplog.text


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_model_with_quantized_experts_is_not_compiled(
    models: dict[str, CheckpointConfig], caplog: pytest.LogCaptureFixture, quantization: str
) -> None:
    flags = f"--compilation-mode inductor --quantization {quantization}"
    assert plan_from_flags(models["llama"], flags, has_graphs=False).mode == "inductor"
    assert plan_from_flags(models["qwen3_moe"], flags, has_graphs=False).mode == "none"
    assert "experts with quantized weights are not traced" in caplog.text


@pytest.mark.parametrize(
    ("num_seqs", "budget"),
    [(1, 1), (3, 2), (5, 512), (64, 512), (64, 40), (300, 8192), (1000, 4096)],
)
def test_default_capture_sizes_fit_every_decode_step_of_up_to_512_tokens(
    num_seqs: int, budget: int
) -> None:
    sizes = default_capture_sizes(num_seqs, budget)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert min(num_seqs, budget, 512) <= sizes[-1] <= min(budget, 512)
    for size, following in itertools.pairwise(sizes):
        assert following - size <= max(8, size // 8) or following <= 8, (
            "much of a step would be padding"
        )
