"""Whether a checkpoint generates or pools: its files, its architecture and the option `runner`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.pooling_config import PoolingConfig, PoolingType
from baton_engine.models.errors import ModelInvalid
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.pooling_params import Task
from support.engine.model_cases import edit_config

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "vocab_size": 300}
LAST = PoolingConfig(type=PoolingType.LAST, normalize=True)
MODULES = "modules.json"


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    return create_checkpoint(tmp_path / "model", "qwen3", pooling="mean", **SMALL)


def write_modules(path: Path, *kinds: str, folder: str = "1_Pooling") -> None:
    modules = [{"path": folder if kind == "Pooling" else "", "type": f"x.{kind}"} for kind in kinds]
    (path / MODULES).write_text(json.dumps(modules))


def write_pooling(path: Path, **fields: Any) -> None:
    (path / "1_Pooling" / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("architecture", "runner", "expected"),
    [
        ("Qwen3ForCausalLM", "auto", None),
        ("Qwen3ForCausalLM", "generate", None),
        ("Qwen3ForCausalLM", "pooling", LAST),
        ("Qwen3Model", "auto", LAST),
        ("Qwen3Model", "pooling", LAST),
    ],
)
def test_the_architecture_and_the_runner_decide_without_files(
    tmp_path: Path, architecture: str, runner: str, expected: PoolingConfig | None
) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", **SMALL)
    edit_config(path, architectures=[architecture])
    assert load_checkpoint_config(path, runner).pooling == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingType.CLS),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, PoolingType.MEAN),
        ({"pooling_mode_lasttoken": True}, PoolingType.LAST),
        ({"pooling_mode": "lasttoken"}, PoolingType.LAST),
        ({"pooling_mode": "cls"}, PoolingType.CLS),
        ({"pooling_mode": "mean"}, PoolingType.MEAN),
    ],
)
def test_the_files_of_sentence_transformers_name_the_pooling(
    embedder: Path, fields: dict[str, Any], expected: PoolingType
) -> None:
    write_pooling(embedder, **fields)
    pooling = load_checkpoint_config(embedder).pooling
    assert pooling == PoolingConfig(type=expected, normalize=True)
    write_modules(embedder, "Transformer", "Pooling")
    pooling = load_checkpoint_config(embedder).pooling
    assert pooling == PoolingConfig(type=expected, normalize=False)


def test_a_runner_that_generates_ignores_these_files(embedder: Path) -> None:
    assert load_checkpoint_config(embedder, "generate").pooling is None


@pytest.mark.parametrize(
    ("kinds", "folder", "message"),
    [
        (("Transformer", "Dense"), "", "the module Dense is not supported"),
        (("Pooling",), "..", "'..' is not a folder of the checkpoint"),
        (("Pooling",), "/etc", "'/etc' is not a folder of the checkpoint"),
        (("Pooling",), "../other", "'../other' is not a folder of the checkpoint"),
        (("Pooling",), "2_Pooling", "2_Pooling/config.json is missing"),
    ],
)
def test_hostile_or_unknown_modules_are_refused(
    embedder: Path, kinds: tuple[str, ...], folder: str, message: str
) -> None:
    write_modules(embedder, *kinds, folder=folder)
    with pytest.raises(ModelInvalid, match=message):
        load_checkpoint_config(embedder)


def test_a_folder_that_is_a_link_is_refused(embedder: Path, tmp_path: Path) -> None:
    (embedder / "1_Pooling").rename(tmp_path / "other")
    (embedder / "1_Pooling").symlink_to(tmp_path / "other")
    with pytest.raises(ModelInvalid, match="is not a folder of the checkpoint"):
        load_checkpoint_config(embedder)


@pytest.mark.parametrize(
    "content", ["", "{}", "5", '["Pooling"]', '[{"type": "x.Pooling"}]', "[[]]"]
)
def test_malformed_modules_are_refused_with_the_file(embedder: Path, content: str) -> None:
    (embedder / MODULES).write_text(content)
    with pytest.raises(ModelInvalid, match=MODULES):
        load_checkpoint_config(embedder)


@pytest.mark.parametrize(
    "fields", [{"pooling_mode_max_tokens": True}, {"pooling_mode": "weightedmean"}, {}]
)
def test_other_poolings_are_refused(embedder: Path, fields: dict[str, Any]) -> None:
    write_pooling(embedder, **fields)
    with pytest.raises(ModelInvalid, match="is not supported; known: last, mean, cls"):
        load_checkpoint_config(embedder)


@pytest.mark.parametrize("arch", ["qwen3", "bert"])
def test_a_classifier_scores(tmp_path: Path, arch: str) -> None:
    path = create_checkpoint(tmp_path / arch, arch, classifier=True, **SMALL)
    config = load_checkpoint_config(path)
    assert config.pooling is not None
    assert config.pooling.task is Task.CLASSIFY
    assert config.num_labels == 1
    assert config.is_encoder == (arch == "bert")


@pytest.mark.parametrize("tokens", [5, "no", ["no"], ["no", 5]])
def test_malformed_tokens_of_a_classifier_are_refused(tmp_path: Path, tokens: Any) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen3", **SMALL)
    edit_config(path, classifier_from_token=tokens)
    with pytest.raises(ModelInvalid, match="classifier_from_token must be two tokens"):
        load_checkpoint_config(path)


@pytest.mark.parametrize("field", ["hidden_act", "position_embedding_type"])
def test_an_encoder_with_another_activation_or_other_positions_is_refused(
    tmp_path: Path, field: str
) -> None:
    path = create_checkpoint(tmp_path / "bert", "bert", **SMALL)
    edit_config(path, **{field: "relative_key"})
    with pytest.raises(ModelInvalid, match=f"{field} must be"):
        load_checkpoint_config(path)
