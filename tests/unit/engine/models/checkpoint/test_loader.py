"""Loading of weights from checkpoints, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.loader import (
    IDENTITY_PAGE_BYTES,
    IDENTITY_PAGES,
    identity_files,
)
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from support.engine.model_cases import assert_invalid, edit_config, load

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_weight_targets_hold_the_values_of_the_checkpoint(checkpoint: Path) -> None:
    model = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    targets = model.weight_targets()
    assert set(targets) == set(tensors)
    assert all(torch.equal(targets[name].parameter, tensors[name]) for name in tensors)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_checkpoint_saved_by_transformers_can_be_loaded(arch: str, tmp_path: Path) -> None:
    """Version 5 of transformers has other config fields for the rotary embedding and the dtype."""
    from transformers import AutoModelForCausalLM

    made = create_checkpoint(tmp_path / "made", arch, num_layers=1, vocab_size=300)
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(tmp_path / "saved")
    assert load_checkpoint_config(tmp_path / "saved") == load_checkpoint_config(made)
    expected, actual = load(made).state_dict(), load(tmp_path / "saved").state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_error_about_a_missing_tensor_names_it(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.pop(K_PROJ))
    assert_invalid(checkpoint, "model.safetensors", K_PROJ, "missing")


def test_the_error_about_an_unexpected_tensor_names_it(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    assert_invalid(checkpoint, "model.safetensors", "model.extra.weight", "unexpected")


def test_the_error_about_a_wrong_shape_names_the_tensor_and_both_shapes(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ][:-1].clone()}))
    assert_invalid(checkpoint, "model.safetensors", K_PROJ, "(63, 128)", "(64, 128)")


def test_the_error_about_an_integer_tensor_names_it(checkpoint: Path) -> None:
    edit_tensors(
        checkpoint, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(torch.int8)})
    )
    assert_invalid(checkpoint, "model.safetensors", K_PROJ, "I8")


@pytest.mark.parametrize("size", [0, 5, 200])
def test_the_error_about_a_file_truncated_in_its_header_names_the_file(
    checkpoint: Path, size: int
) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(content[:size])
    assert_invalid(checkpoint, "model.safetensors", "truncated")


def test_the_error_about_a_file_truncated_in_its_data_names_file_and_tensor(
    checkpoint: Path,
) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(content[:-4])
    assert_invalid(checkpoint, "model.safetensors", "truncated", "tensor ")


def test_the_error_about_a_malformed_weight_file_names_it(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not a header at all")
    assert_invalid(checkpoint, "model.safetensors", "malformed")


def test_the_error_about_a_folder_without_weights_names_the_expected_files(
    checkpoint: Path,
) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert_invalid(checkpoint, "neither model.safetensors nor model.safetensors.index.json")


def test_the_error_about_a_missing_shard_names_it(tmp_path: Path) -> None:
    path = create_checkpoint(
        tmp_path / "sharded", "llama", num_layers=1, vocab_size=300, max_shard_size=200_000
    )
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    assert_invalid(path, shards[0].name, "missing")


def test_the_output_projection_of_a_tied_checkpoint_is_ignored(checkpoint: Path) -> None:
    edit_config(checkpoint, tie_word_embeddings=True)
    assert not any(name.startswith("lm_head") for name in load(checkpoint).state_dict())


def test_identity_files_hold_the_config_and_a_bounded_sample_of_the_weights(
    checkpoint: Path,
) -> None:
    before = identity_files(checkpoint)
    assert set(before) == {"config.json", "model.safetensors"}
    assert sum(map(len, before.values())) < IDENTITY_PAGES * IDENTITY_PAGE_BYTES + 20_000
    edit_config(checkpoint, rms_norm_eps=1e-5)
    assert identity_files(checkpoint) != before
