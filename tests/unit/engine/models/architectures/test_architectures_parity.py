"""Parity with transformers: logits and logprobs of every architecture, by prompt and by chunk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.models import forward_context as forward_context_file
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.forward_context import forward_context
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from baton_kernels.attention import plan_attention
from support.engine.model_cases import (
    chunk_batch,
    edit_config,
    load,
    new_kv_cache,
    run_model,
    with_biases,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
VOCAB_SIZE = 300
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}


def sequences(num_seqs: int, num_tokens: int) -> list[list[int]]:
    draw = random.Random(num_tokens)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_seqs)]


def assert_parity(path: Path, num_tokens: int, chunks: tuple[int, ...]) -> torch.Tensor:
    """Compare all positions of three sequences for each chunk size; return the expected logits."""
    from transformers import AutoModelForCausalLM

    reference, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], "the made checkpoint is incomplete"
    assert not report["unexpected_keys"]
    tokens = sequences(3, num_tokens)
    with torch.inference_mode():
        expected: torch.Tensor = reference(torch.tensor(tokens)).logits
    model = load(path)
    for chunk in chunks:
        actual = run_model(model, tokens, chunk)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(
            actual.log_softmax(-1), expected.log_softmax(-1), atol=TOLERANCE, rtol=0
        )
    return expected


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


def test_logits_match_transformers_with_dense_and_sparse_layers(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3_moe", **SMALL)
    weights = load_file(path / "model.safetensors")
    weights = {
        name: weight
        for name, weight in weights.items()
        if not name.startswith("model.layers.1.mlp.")
    }
    for name, shape in {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}.items():
        weights[f"model.layers.1.mlp.{name}.weight"] = torch.randn(shape) / 8
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, mlp_only_layers=[1])
    assert_parity(path, num_tokens=20, chunks=(20,))


def test_sparse_layers_record_routed_experts_if_the_context_has_a_list_for_them(
    tmp_path: Path,
) -> None:
    path = create_checkpoint(
        tmp_path / "model", "mixtral", num_experts=5, num_experts_per_tok=3, **SMALL
    )
    model, tokens = load(path), sequences(2, 9)
    batch = chunk_batch(tokens, 0, 9, new_kv_cache(model, 9, 2))
    recorded = batch.context.routed_experts = []
    with torch.inference_mode(), forward_context(batch.context):
        model(batch.input_ids, batch.positions)
    assert [tuple(experts.shape) for experts in recorded] == [(18, 3)] * 2
    assert all(
        len(set(row)) == 3 and max(row) < 5 for experts in recorded for row in experts.tolist()
    )
