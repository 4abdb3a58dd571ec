"""Settings that expert parallelism does not support are refused before weights are read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine.compilation.cudagraph_dispatcher import CudagraphMode
from baton_engine.executor.external_launcher import ExternalLauncherExecutor
from baton_engine.executor.startup import refuse_expert_parallel
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.errors import ConfigurationError
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.experts.config_checks import check_expert_parallel
from baton_engine.worker.forward.compilation_plan import plan_compilation
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.worker import Worker
from baton_protocol.options.config import (
    CompilationConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from support.engine.step_driver import runner_config

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": 301}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("checks") / "model", "mixtral", **SMALL)


def config(path: Path, **changes: object) -> EngineConfig:
    changes.setdefault("parallel", ParallelConfig(enable_expert_parallel=True))
    return msgspec.structs.replace(runner_config(path), **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"parallel": ParallelConfig(enable_expert_parallel=True, pipeline_parallel_size=2)},
            "pipeline_parallel_size",
        ),
        ({"scheduler": SchedulerConfig(async_scheduling=True)}, "scheduler.async_scheduling"),
        ({"compilation": CompilationConfig(mode="inductor")}, "compilation.mode"),
        ({"compilation": CompilationConfig(cudagraph_mode="full")}, "compilation.cudagraph_mode"),
    ],
)
def test_the_refusal_names_the_field_and_enable_expert_parallel(
    checkpoint: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigurationError, match=field) as caught:
        ModelRunner(config(checkpoint, **changes)).load_model()
    assert caught.value.reason == "InvalidConfig"
    assert "parallel.enable_expert_parallel" in caught.value.message


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", **SMALL)
    with pytest.raises(
        ConfigurationError, match="enable_expert_parallel is set: LlamaForCausalLM has no experts"
    ):
        ModelRunner(config(path)).load_model()


def test_a_pooling_model_is_refused(checkpoint: Path) -> None:
    pooled = load_checkpoint_config(checkpoint, "pooling")
    with pytest.raises(ConfigurationError, match="the model pools prompts"):
        check_expert_parallel(config(checkpoint), pooled, torch.device("cpu"))


def test_encoders_are_neither_compiled_nor_captured(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "bert", "bert", **SMALL)
    plan = plan_compilation(runner_config(path), load_checkpoint_config(path), 128, has_graphs=True)
    assert (plan.mode, plan.cudagraph_mode) == ("none", CudagraphMode.NONE)


def test_num_blocks_must_be_set_for_a_gpu(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cache\.num_blocks is not set"):
        check_expert_parallel(
            config(checkpoint), load_checkpoint_config(checkpoint), torch.device("cuda")
        )


def test_auto_modes_are_none_on_a_device_with_graphs(checkpoint: Path) -> None:
    plan = plan_compilation(
        config(checkpoint), load_checkpoint_config(checkpoint), 128, has_graphs=True
    )
    assert (plan.mode, plan.cudagraph_mode) == ("none", CudagraphMode.NONE)


def test_executors_that_cannot_interrupt_a_step_are_refused(checkpoint: Path) -> None:
    executor = _UninitializedExecutor(config(checkpoint))
    with pytest.raises(
        ConfigurationError,
        match="executor external_launcher cannot serve in an expert-parallel group",
    ):
        ExternalLauncherExecutor.initialize(executor)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="executor ray cannot serve"):
        refuse_expert_parallel(config(checkpoint), "ray")
    refuse_expert_parallel(runner_config(checkpoint), "ray")


class _UninitializedExecutor:
    """An executor before initialize() reads the environment of torchrun."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config


def test_an_interrupt_without_a_generation_does_nothing(checkpoint: Path) -> None:
    worker = Worker(config(checkpoint), "instance")
    worker.load_model()
    worker.interrupt()
    worker.shutdown()
