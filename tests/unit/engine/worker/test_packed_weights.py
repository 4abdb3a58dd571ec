"""Packed weights compute the same as plain ones; quantized weights compute nearly the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.factory import load_model
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from baton_engine.worker.packed_weights import pack_weights, quantize_weights
from baton_kernels.linear import PackedWeight, QuantizedWeight
from baton_protocol.options.config import QUANTIZATIONS
from support.engine.model_cases import CPU, run_model


def is_matmul_weight(name: str) -> bool:
    """Return whether a weight is an operand of a matrix product: not a norm, not an embedding."""
    return "norm" not in name and not name.startswith("embed")


def prepared_names(plain: dict[str, torch.nn.Parameter]) -> set[str]:
    """Return the names of packed or quantized weights.

    The experts of a layer are loaded as one tensor and then prepared one by one.
    """
    names = {name for name in plain if is_matmul_weight(name) and plain[name].dim() == 2}
    stacked = {name: len(weight) for name, weight in plain.items() if weight.dim() == 3}
    return names | {
        f"{name}.{expert}" for name, experts in stacked.items() for expert in range(experts)
    }


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", False), ("llama", True), ("qwen2", False), ("qwen3_moe", False)],
)
def test_all_matmul_weights_are_packed_and_the_head_keeps_its_output(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = create_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=tied)
    model = load_model(path, load_checkpoint_config(path), torch.float32, CPU)
    plain = dict(model.named_parameters())
    pack_weights(model)
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedWeight)}
    expected = prepared_names(plain)
    assert packed == expected | ({"embed_tokens.packed_weight"} if tied else set())
    hidden = torch.randn(5, model.config.hidden_size)
    head = plain["embed_tokens.weight" if tied else "lm_head.weight"]
    torch.testing.assert_close(
        model.compute_logits(hidden), linear(hidden, head), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_computes_the_same_logits(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = create_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=tied)
    model = load_model(path, load_checkpoint_config(path), torch.float32, CPU)
    sequences = [list(range(1, 20)), list(range(5, 24))]
    expected = run_model(model, sequences, chunk=6)
    pack_weights(model)
    torch.testing.assert_close(run_model(model, sequences, chunk=6), expected, atol=1e-4, rtol=1e-4)


def test_weights_in_half_precision_are_not_packed(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "llama")
    model = load_model(path, load_checkpoint_config(path), torch.float16, CPU)
    pack_weights(model)
    assert not any(isinstance(module, PackedWeight) for module in model.modules())


@pytest.mark.parametrize(
    ("quantization", "dense_bound", "sparse_bound"), [("int8", 0.1, 0.5), ("int4", 0.7, 1.0)]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_model_computes_nearly_the_same_logits(
    tmp_path: Path,
    architecture: str,
    tied: bool,
    quantization: str,
    dense_bound: float,
    sparse_bound: float,
) -> None:
    path = create_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=tied)
    model = load_model(path, load_checkpoint_config(path), torch.float32, CPU)
    sequences = [list(range(1, 20)), list(range(5, 24))]
    expected = run_model(model, sequences, chunk=19)
    quantize_weights(model, quantization)
    # Rounding normally distributed weights to int4 changes them by 10 %, and layers add up. Random
    # routers have near-ties, so rounding selects other experts. An unrelated model would have an
    # error of 1.4.
    bound = sparse_bound if model.config.sparse_layers else dense_bound
    for chunk in (6, 19):  # few and many rows take different code paths
        logits = run_model(model, sequences, chunk)
        assert (logits - expected).square().mean().sqrt() < bound * expected.std()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_matmul_weights_but_routers_are_quantized_and_their_floats_are_freed(
    tmp_path: Path, tied: bool, quantization: str
) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3_moe", tie_word_embeddings=tied)
    model = load_model(path, load_checkpoint_config(path), torch.float32, CPU)
    plain = dict(model.named_parameters())
    quantize_weights(model, quantization)
    bits = {
        name: module.bits
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
    }
    quantized = set(bits)
    head = "embed_tokens.packed_weight" if tied else "lm_head.weight"
    assert bits.pop(head) == 8
    assert set(bits.values()) == {8 if quantization == "int8" else 4}
    expected = {name for name in prepared_names(plain) if "mlp.gate.weight" not in name}
    assert quantized == expected | ({"embed_tokens.packed_weight"} if tied else set())
    left = dict(model.named_parameters()).keys()
    assert not {
        name
        for name in left
        if is_matmul_weight(name) and plain[name].dim() > 1 and "mlp.gate.weight" not in name
    }
