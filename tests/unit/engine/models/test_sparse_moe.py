"""Sparse layers: logits of transformers, and the experts that they record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.models.forward_context import forward_context
from baton_engine.random_checkpoint import create_checkpoint
from support.engine.model_cases import (
    chunk_batch,
    edit_config,
    load,
    new_kv_cache,
)
from support.engine.parity import SMALL, assert_parity, sequences

pytestmark = pytest.mark.usefixtures("one_thread")


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
