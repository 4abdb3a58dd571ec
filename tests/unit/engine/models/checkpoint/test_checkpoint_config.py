"""The configurations of checkpoints: supported fields, and errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.errors import ModelNotFound
from support.engine.model_cases import assert_invalid, edit_config


def test_the_error_about_a_missing_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load_checkpoint_config(tmp_path / "absent")
    assert caught.value.reason == "ModelNotFound"
    assert str(tmp_path / "absent") in caught.value.message


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
