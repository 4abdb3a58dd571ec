"""All layers in one compiled operation compute the same bits as the layers one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.models.forward_context import forward_context
from baton_engine.models.fused_layers import FusedModel, fuse_layers
from baton_engine.models.layers import CausalLM
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.packed_weights import pack_weights, quantize_weights
from baton_kernels import cpu
from baton_protocol.options.config import QUANTIZATIONS
from support.engine.model_cases import chunk_batch, load, new_kv_cache, run_model, with_biases
from support.engine.ranks.expert_ranks import ThreadNetwork, ThreadRank

SEQUENCES = [list(range(1, 20)), list(range(5, 24)), list(range(7, 26))]


def fused_model(
    path: Path, prepare: Callable[[CausalLM], None] = pack_weights
) -> tuple[CausalLM, FusedModel | None]:
    model = load(path)
    prepare(model)
    return model, fuse_layers(model)


@pytest.mark.skipif(cpu.OPS is None, reason="no compiled operations")
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"sliding_window": 5}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
    ],
)
def test_fused_layers_compute_the_same_bits(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    path = create_checkpoint(tmp_path / "model", architecture, **options)
    quantizations = (partial(quantize_weights, quantization=name) for name in QUANTIZATIONS)
    for prepare in (pack_weights, *quantizations):
        assert_same_bits(*fused_model(path, prepare))


def assert_same_bits(model: CausalLM, fused: FusedModel | None) -> None:
    assert fused is not None
    for chunk in (1, 4, 19):
        together = run_model(model, SEQUENCES, chunk, fused)
        assert torch.equal(together, run_model(model, SEQUENCES, chunk))


@pytest.mark.skipif(cpu.OPS is None, reason="no compiled operations")
def test_fused_layers_add_every_bias(tmp_path: Path) -> None:
    assert_same_bits(*fused_model(with_biases(create_checkpoint(tmp_path / "model", "llama"))))


def test_expert_parallel_layers_are_not_fused(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3_moe")
    assert ThreadRank("r0", path, ThreadNetwork()).model.sparse_layers
    assert fuse_layers(ThreadRank("r0", path, ThreadNetwork()).model) is None


def test_layers_run_one_by_one_while_a_step_publishes_its_kv(tmp_path: Path) -> None:
    """The callback of a fused run would come after the last layer, and transfers start later."""
    model, fused = fused_model(create_checkpoint(tmp_path / "model", "llama"))
    batch = chunk_batch(SEQUENCES, 0, 19, new_kv_cache(model, 19, len(SEQUENCES)))
    outputs: list[str] = []
    model.layers[-1].mlp.register_forward_hook(lambda *_: outputs.append("mlp"))
    batch.context.kv_written = lambda: outputs.append("kv written")
    with torch.inference_mode(), forward_context(batch.context):
        (fused or model)(batch.input_ids, batch.positions)
    assert outputs == ["kv written", "mlp"]


def test_layers_run_one_by_one_while_a_step_reports_its_routed_experts(tmp_path: Path) -> None:
    model, fused = fused_model(create_checkpoint(tmp_path / "model", "qwen3_moe"))
    batch = chunk_batch(SEQUENCES, 0, 19, new_kv_cache(model, 19, len(SEQUENCES)))
    routed: list[torch.Tensor] = []
    batch.context.routed_experts = routed
    with torch.inference_mode(), forward_context(batch.context):
        (fused or model)(batch.input_ids, batch.positions)
    assert len(routed) == len(model.sparse_layers)
