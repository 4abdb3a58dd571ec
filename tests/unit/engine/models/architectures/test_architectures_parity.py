"""Parity with transformers: logits and logprobs of every architecture, by prompt and by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.models import forward_context as forward_context_file
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from baton_kernels.attention import plan_attention
from support.engine.model_cases import (
    edit_config,
    load,
    run_model,
    with_biases,
)
from support.engine.parity import SMALL, assert_parity, sequences

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_of_whole_prompts_and_of_chunks_match_transformers(
    arch: str, tmp_path: Path
) -> None:
    assert_parity(
        create_checkpoint(tmp_path / "model", arch, **SMALL), num_tokens=33, chunks=(33, 7, 1)
    )


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "llama"])
def test_logits_match_transformers_with_a_window_smaller_than_the_prompt(
    arch: str, tmp_path: Path
) -> None:
    path = create_checkpoint(tmp_path / "windowed", arch, sliding_window=5, **SMALL)
    windowed = assert_parity(path, num_tokens=33, chunks=(33, 10, 1))
    without = create_checkpoint(tmp_path / "without", arch, **SMALL)
    assert not torch.allclose(windowed, assert_parity(without, 33, ()), atol=0.1), (
        "the window changes nothing"
    )


def test_attention_is_planned_once_per_step_and_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 and 1 attend to all tokens, layers 2 and 3 to a window."""
    layers = {**SMALL, "num_layers": 4}
    path = create_checkpoint(tmp_path / "model", "qwen3", sliding_window=5, **layers)
    edit_config(path, layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2)
    windows: list[int | None] = []

    def counted(*arguments: Any) -> object:
        windows.append(arguments[5])
        return plan_attention(*arguments)

    monkeypatch.setattr(forward_context_file, "plan_attention", counted)
    run_model(load(path), sequences(3, 8), chunk=4)
    assert windows == [None, 5] * 2  # two steps


def test_yarn_raises_max_position_embeddings_by_its_factor(tmp_path: Path) -> None:
    """As Qwen documents it, only rope_scaling changes in the config."""
    path = create_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=64, **SMALL)
    edit_config(
        path,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    )
    assert load_checkpoint_config(path).max_position_embeddings == 256


@pytest.mark.parametrize("tied", [False, True])
def test_logits_match_transformers_with_biases_and_tied_embeddings(
    tied: bool, tmp_path: Path
) -> None:
    path = with_biases(
        create_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=tied, **SMALL)
    )
    assert_parity(path, num_tokens=20, chunks=(20, 6))
