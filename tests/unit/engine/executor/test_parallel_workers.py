"""Real workers as tensor ranks and pipeline stages give the same tokens as one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton_engine.executor.base import executor_name, load_executor_class
from baton_engine.models.errors import ConfigurationError, ModelNotFound
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.worker import Worker
from baton_kv_transfer.transports.ucx.library import UCXError
from baton_protocol.options.config import EngineConfig, KVRole, KVTransferConfig
from support.engine.greedy_steps import generate, model_config
from support.engine.ranks.torchrun import run_under_torchrun

ARCHITECTURES = ("llama", "qwen3_moe")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {arch: create_checkpoint(root / arch, arch, seed=5) for arch in ARCHITECTURES}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, dict[str, list[int]]]:
    return {arch: run(model_config(path)) for arch, path in checkpoints.items()}


def run(config: EngineConfig) -> dict[str, list[int]]:
    executor = load_executor_class(executor_name(config))(config, "instance", lambda: None)
    try:
        info = executor.initialize()
        assert (info.num_blocks, info.num_swap_blocks) == (16, 0)
        return generate(executor)
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    ("arch", "tensor", "pipeline"),
    [("llama", 1, 2), ("llama", 2, 2), ("qwen3_moe", 2, 1)],
)
def test_multiproc_workers_give_the_tokens_of_one_process(
    checkpoints, expected, arch: str, tensor: int, pipeline: int
) -> None:
    assert run(model_config(checkpoints[arch], tensor, pipeline)) == expected[arch]


def test_external_launcher_ranks_give_the_tokens_of_one_process(
    checkpoints, expected, tmp_path: Path
) -> None:
    for result in run_under_torchrun(2, tmp_path, "real", checkpoints["llama"]):
        assert result["tokens of 2 x 1"] == expected["llama"]
        assert result["tokens of 1 x 2"] == expected["llama"]


@pytest.mark.parametrize(
    "error", [ValueError("needs a UCX with verbs"), UCXError("needs a UCX with verbs")]
)
def test_a_transport_that_does_not_start_is_a_configuration_error(
    checkpoints, monkeypatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("baton_engine.worker.worker.TransferConnector", refuse)
    config = msgspec.structs.replace(
        model_config(checkpoints["llama"], 1, 1), kv_transfer=KVTransferConfig(role=KVRole.BOTH)
    )
    worker = Worker(config, "instance")
    worker.load_model()
    with pytest.raises(ConfigurationError, match="needs a UCX with verbs") as refused:
        worker.open_connector(lambda: None)
    assert refused.value.reason == "KVTransferInvalid"


def test_a_missing_model_of_workers_is_reported_as_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        run(model_config(tmp_path / "nothing", tensor=2))
