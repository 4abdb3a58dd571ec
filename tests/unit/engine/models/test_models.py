"""Reading of checkpoints: supported configurations, and errors that name what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.metrics.load_counter import COUNTER
from baton_engine.models.architectures import qwen2
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.loader import (
    IDENTITY_PAGE_BYTES,
    IDENTITY_PAGES,
    identity_files,
)
from baton_engine.models.errors import ModelInvalid, ModelNotFound
from baton_engine.models.factory import load_model
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from support.engine.model_cases import edit_config

GUIDE = Path(__file__).parents[4] / "docs" / "internals" / "adding-a-model.md"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_layers=2, vocab_size=300
    )


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(path: Path) -> torch.nn.Module:
    return load_model(path, load_checkpoint_config(path), torch.float32, torch.device("cpu"))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def assert_invalid(path: Path, *parts: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        load(path)
    assert caught.value.reason == "ModelInvalid"
    for part in parts:
        assert part in caught.value.message


def test_the_error_about_a_missing_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load_checkpoint_config(tmp_path / "absent")
    assert caught.value.reason == "ModelNotFound"
    assert str(tmp_path / "absent") in caught.value.message


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


def test_the_load_counter_has_read_all_bytes_after_a_load(checkpoint: Path) -> None:
    load(checkpoint)
    progress = COUNTER.progress()
    assert progress.done_bytes == progress.total_bytes > 0


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT9ForCausalLM"]}, "GPT9ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "sliding_window is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_an_unsupported_config_is_refused_with_the_field_in_the_message(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(checkpoint, **changes)
    assert_invalid(checkpoint, message)


def test_the_error_about_a_config_that_is_not_json_names_the_file(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert_invalid(checkpoint, "config.json")


def test_rope_theta_and_rope_parameters_are_read_alike(checkpoint: Path) -> None:
    edit_config(checkpoint, rope_theta=5000.0)
    old = load_checkpoint_config(checkpoint)
    edit_config(
        checkpoint, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}
    )
    assert load_checkpoint_config(checkpoint) == old
    assert old.rope_theta == 5000.0


def test_eos_tokens_of_the_generation_config_override_those_of_the_config(checkpoint: Path) -> None:
    assert load_checkpoint_config(checkpoint).eos_token_ids == (2, 0)
    (checkpoint / "generation_config.json").unlink()
    assert load_checkpoint_config(checkpoint).eos_token_ids == (2,)


def test_identity_files_hold_the_config_and_a_bounded_sample_of_the_weights(
    checkpoint: Path,
) -> None:
    before = identity_files(checkpoint)
    assert set(before) == {"config.json", "model.safetensors"}
    assert sum(map(len, before.values())) < IDENTITY_PAGES * IDENTITY_PAGE_BYTES + 20_000
    edit_config(checkpoint, rms_norm_eps=1e-5)
    assert identity_files(checkpoint) != before


def test_the_guide_to_adding_a_model_shows_the_current_code_of_qwen2() -> None:
    assert Path(qwen2.__file__).read_text() in GUIDE.read_text()


def test_the_parity_script_of_the_guide_runs_and_reports_small_differences(original: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    [script] = [block for block in blocks if "MODEL_DIR" in block]
    done = subprocess.run(
        ["bash", "-e", "-c", script.replace("MODEL_DIR", str(original))],
        cwd=GUIDE.parents[2],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gaps = re.findall(r"^chunks of \d+: .* differ by (\S+) at most$", done.stdout, re.MULTILINE)
    assert len(gaps) == 2
    assert all(float(gap) < 1e-4 for gap in gaps)


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, None, set()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8, {1}),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 9}, 8, set()),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            8,
            {0},
        ),
        ({"sliding_window": 8, "model_type": "mistral"}, 8, {0, 1}),
        ({"sliding_window": 8, "model_type": "mixtral"}, 8, {0, 1}),
        ({"model_type": "mixtral"}, None, set()),
    ],
    ids=str,
)
def test_the_config_decides_which_layers_have_a_sliding_window(
    checkpoint: Path, changes: dict[str, Any], window: int | None, layers: set[int]
) -> None:
    edit_config(checkpoint, **changes)
    config = load_checkpoint_config(checkpoint)
    assert (config.sliding_window, config.windowed_layers) == (window, layers)


def test_a_config_that_relies_on_a_default_sliding_window_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="mistral")
    assert_invalid(checkpoint, "sliding_window is missing")
