"""Settings and models with which workers cannot exchange KV blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton_engine.models.errors import ConfigurationError
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.worker import Worker
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.engine.greedy_steps import model_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", "llama", seed=5)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (1, 2, r"have all layers, and pipeline_parallel_size is 2; set it to 1 "),
        (8, 1, r"tensor_parallel_size is 8 and the model has \d KV heads, but .*lower tensor_"),
    ],
)
def test_kv_transfer_is_refused_if_workers_lack_whole_heads_or_layers(
    llama: Path, tensor: int, pipeline: int, message: str
) -> None:
    config = msgspec.structs.replace(
        model_config(llama, tensor, pipeline),
        kv_transfer=KVTransferConfig(role=KVRole.BOTH),
    )
    with pytest.raises(ConfigurationError, match=message) as error:
        Worker(config, "instance").load_model()
    assert error.value.reason == "KVTransferInvalid"


def test_kv_transfer_is_refused_for_a_pooling_model(llama: Path) -> None:
    config = model_config(llama, 1, 1)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, runner="pooling"),
        kv_transfer=KVTransferConfig(role=KVRole.CONSUMER),
    )
    with pytest.raises(ConfigurationError, match="the model pools prompts") as error:
        Worker(config, "instance").load_model()
    assert error.value.reason == "KVTransferInvalid"
