"""A hostile checkpoint ends the load with ModelInvalid, which names the file."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.cli import main
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.loader import (
    identity_files,
    read_ahead,
    read_slices,
    read_tensor_index,
)
from baton_engine.models.checkpoint.sharding import WeightTarget
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.factory import load_model
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.checkpoint_files import open_file
from support.hostile.attack import Attack, fields, parametrize
from support.hostile.configs import CONFIG_ATTACKS, GENERATION_ATTACKS
from support.hostile.weights import INDEX, INDEX_ATTACKS, WEIGHT_ATTACKS, WEIGHTS

CPU = torch.device("cpu")
#: Python objects of one load. The largest honest header below the limits takes about as much.
MAX_BYTES = 600 * 2**20


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_layers=1, vocab_size=300
    )


def load(path: Path) -> list[str]:
    """Load the model. Return the names of the files that identify it."""
    load_model(path, load_checkpoint_config(path), torch.float32, CPU)
    return sorted(identity_files(path))


@parametrize([*WEIGHT_ATTACKS, *INDEX_ATTACKS, *CONFIG_ATTACKS, *GENERATION_ATTACKS])
def test_an_attack_is_refused_with_the_file_in_the_message(
    checkpoint: Path, attack: Attack
) -> None:
    attack.apply(checkpoint)
    tracemalloc.start()
    try:
        with pytest.raises(ModelInvalid) as caught:
            load(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "ModelInvalid"
    assert attack.message in caught.value.message
    assert str(checkpoint) in caught.value.message


def link_files(source: Path, folder: Path) -> Path:
    """Move the files of `source` to `folder`, and leave links to them. Return `source`."""
    paths = sorted(source.iterdir())
    folder.mkdir(parents=True)
    for number, path in enumerate(paths):
        blob = path.rename(folder / f"blob{number}")
        path.symlink_to(os.path.relpath(blob, source))
    return source


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_snapshot_in_a_cache_of_the_hub_is_loaded(
    checkpoint: Path, tmp_path: Path, below: str
) -> None:
    """Its files, and those of its subfolders, are links to the blobs of the cache."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd" / below
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    names = load(link_files(snapshot, tmp_path / "models--org--name" / "blobs"))
    assert names == ["config.json", WEIGHTS]


def test_links_to_other_blobs_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    link_files(snapshot, tmp_path / "models--other--name" / "blobs")
    with pytest.raises(ModelInvalid, match="outside of the model's folder"):
        load(snapshot)


def test_links_within_the_folder_are_followed(checkpoint: Path) -> None:
    """A volume of a ConfigMap has such links, and the folder itself may also be a link."""
    alias = checkpoint.with_name("alias")
    alias.symlink_to(checkpoint)
    link_files(alias, alias / "..data")
    assert load(alias) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("reader", [read_slices, read_ahead])
def test_a_file_that_is_replaced_after_the_checks_is_refused(
    checkpoint: Path, tmp_path: Path, reader: Callable[..., object]
) -> None:
    """Another pod may write to a shared cache while an engine loads."""
    entries = read_tensor_index(checkpoint)
    name, entry = next(iter(entries.items()))
    targets = {name: WeightTarget(torch.zeros(entry.shape), entry.shape)}
    reader(entries, targets)
    file = checkpoint / WEIGHTS
    file.rename(tmp_path / WEIGHTS)
    file.symlink_to(tmp_path / WEIGHTS)
    with pytest.raises(ModelInvalid, match="outside of the model's folder"):
        reader(entries, targets)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelInvalid, match="not a regular file"):
        reader(entries, targets)


def test_a_folder_that_is_replaced_during_the_checks_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_NOFOLLOW refuses a link in place of the file, and none in place of a folder."""
    link_files(checkpoint, checkpoint / "..data")
    (tmp_path / "other").mkdir()
    blob = (checkpoint / WEIGHTS).resolve()
    (tmp_path / "other" / blob.name).write_text("of another model")
    is_file = Path.is_file

    def replace(path: Path) -> bool:
        found = is_file(path)
        blob.parent.rename(checkpoint / "before")
        blob.parent.symlink_to(tmp_path / "other")
        return found

    monkeypatch.setattr(Path, "is_file", replace)
    with pytest.raises(ValueError, match="was replaced while it was opened"):
        open_file(checkpoint, WEIGHTS)


def test_a_sound_index_is_loaded(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    halves = (list(tensors)[::2], list(tensors)[1::2])
    weight_map = {}
    for number, names in enumerate(halves):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, checkpoint / file)
        weight_map |= dict.fromkeys(names, file)
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    shards = ["model-0.safetensors", "model-1.safetensors"]
    assert load(checkpoint) == ["config.json", *shards, INDEX]


def test_an_engine_reports_a_hostile_checkpoint_as_fatal(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields(hidden_size=10**12)(checkpoint / "config.json")
    assert main(["--model", str(checkpoint)]) == os.EX_CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"FATAL ModelInvalid: {checkpoint}/config.json: hidden_size")
