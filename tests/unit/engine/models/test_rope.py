"""Scaled rotary embeddings give the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_engine.random_checkpoint import create_checkpoint
from support.engine.model_cases import (
    edit_config,
)
from support.engine.parity import SMALL, assert_parity

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_logits_match_transformers_with_a_scaled_rotary_embedding_beyond_the_original_length(
    arch: str, kind: str, tmp_path: Path
) -> None:
    path = create_checkpoint(
        tmp_path / "model",
        arch,
        rope_scaling=kind,
        rope_factor=4.0,
        max_position_embeddings=128,
        **SMALL,
    )
    assert_parity(path, num_tokens=100, chunks=(100, 33))


@pytest.mark.parametrize(
    "parameters",
    [
        {"beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"truncate": False},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_logits_match_transformers_for_every_field_of_yarn(
    parameters: dict[str, Any], tmp_path: Path
) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", max_position_embeddings=64, **SMALL)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | parameters
    edit_config(path, rope_theta=None, rope_parameters={"rope_theta": 500.0, **yarn})
    assert_parity(path, num_tokens=50, chunks=(50,))
