"""The checkpoint of the tests that change generations, and the logits of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from baton_engine.random_checkpoint import create_checkpoint
from support.engine.model_cases import load, run_model
from support.engine.ranks.generation_cases import SEQUENCES

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": 301}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("generations") / "model", "qwen3_moe", seed=6, **SMALL
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tensor:
    return run_model(load(checkpoint), SEQUENCES, 7)
