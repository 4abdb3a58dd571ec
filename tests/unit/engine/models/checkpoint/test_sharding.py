"""Models sharded over tensor ranks and pipeline stages: logits, weights per rank, and errors."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from baton_engine.distributed.group import LoneGroup, ParallelContext
from baton_engine.models.checkpoint import loader
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.models.checkpoint.sharding import ModelShard, WeightTarget, shard
from baton_engine.models.errors import ConfigurationError, ModelInvalid
from baton_engine.models.factory import load_model, make_model
from baton_engine.random_checkpoint import ARCHITECTURES, create_checkpoint
from support.engine.model_cases import (
    load,
    new_kv_cache,
    run_model,
    run_ranks,
    with_biases,
)

pytestmark = pytest.mark.usefixtures("one_thread")

#: The logits have a standard deviation of 3. The largest rounding error seen was 3.03e-5.
TOLERANCE = 4e-5
#: Not a multiple of the tensor sizes, so the last rank has padding.
VOCAB_SIZE = 301
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}
SPLITS = [(2, 1), (4, 1), (1, 2), (2, 2)]


def sequences(num_seqs: int, num_tokens: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_seqs)]


def place(
    tensor: int = 1, tensor_rank: int = 0, pipeline: int = 1, stage: int = 0
) -> ParallelContext:
    """Return the context of a rank. Its groups have sizes and ranks but cannot communicate."""

    def fake_group(rank: int, size: int) -> LoneGroup:
        group = LoneGroup()
        group.rank, group.size = rank, size
        return group

    return ParallelContext(fake_group(tensor_rank, tensor), fake_group(stage, pipeline))


def assert_same_logits_as_one_rank(path: Path, tensor_size: int, pipeline_size: int) -> None:
    """Compare whole prompts and chunks. All ranks of the last stage must get the same bits."""
    tokens = sequences(3, 21)
    for chunk in (21, 8):
        expected = run_model(load(path), tokens, chunk)
        results = run_ranks(
            lambda rank: run_model(load(path, rank), tokens, chunk),  # noqa: B023
            tensor_size,
            pipeline_size,
        )
        assert all(result.numel() == 0 for result in results[:-tensor_size]), (
            "only the last stage has logits"
        )
        last = results[-tensor_size:]
        assert last[0].shape == (3, 21, VOCAB_SIZE)
        torch.testing.assert_close(last[0], expected, atol=TOLERANCE, rtol=0)
        assert all(torch.equal(last[0], other) for other in last[1:])


@pytest.mark.parametrize(("tensor_size", "pipeline_size"), SPLITS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_those_of_one_rank(
    arch: str, tensor_size: int, pipeline_size: int, tmp_path: Path
) -> None:
    """The model has two KV heads, so two of four ranks have copies of the same head."""
    assert_same_logits_as_one_rank(
        create_checkpoint(tmp_path / "model", arch, **SMALL), tensor_size, pipeline_size
    )


@pytest.mark.parametrize(("tensor_size", "pipeline_size"), SPLITS)
def test_logits_equal_those_of_one_rank_with_tied_embeddings_and_biases(
    tensor_size: int, pipeline_size: int, tmp_path: Path
) -> None:
    path = with_biases(
        create_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True, **SMALL)
    )
    assert_same_logits_as_one_rank(path, tensor_size, pipeline_size)


def test_a_stage_applies_the_window_by_the_layers_index_in_the_whole_model(
    tmp_path: Path,
) -> None:
    """The second of two stages has the layer with the window as its first layer."""
    path = create_checkpoint(tmp_path / "model", "qwen2", sliding_window=4, **SMALL)
    assert_same_logits_as_one_rank(path, tensor_size=1, pipeline_size=2)


def test_shards_have_the_layers_and_heads_of_their_rank(tmp_path: Path) -> None:
    path = create_checkpoint(
        tmp_path / "model", "llama", num_layers=5, num_heads=8, num_kv_heads=2, vocab_size=300
    )
    config = load_checkpoint_config(path)
    assert shard(config) == ModelShard(first_layer=0, num_layers=5, num_heads=8, num_kv_heads=2)
    assert shard(config, place(tensor=2)) == ModelShard(0, 5, 4, 1)
    assert shard(config, place(tensor=8)) == ModelShard(0, 5, 1, 1)
    stages = [shard(config, place(pipeline=3, stage=stage)) for stage in range(3)]
    assert [(stage.first_layer, stage.num_layers) for stage in stages] == [(0, 2), (2, 2), (4, 1)]
    model = make_model(config, place(tensor=2, tensor_rank=1, pipeline=3, stage=2))
    assert new_kv_cache(model, num_tokens=4, num_seqs=1).shape == (1, 1, 1, 2, 4, 32)


@pytest.mark.parametrize(
    ("arch", "sizes", "context", "message"),
    [
        (
            "llama",
            {"num_heads": 6, "num_kv_heads": 2},
            place(tensor=4),
            "tensor_parallel_size=4 must divide num_att",
        ),
        (
            "llama",
            {"num_heads": 12, "num_kv_heads": 3},
            place(tensor=2),
            "num_key_value_heads=3 or be a multiple",
        ),
        ("llama", {"intermediate_size": 97}, place(tensor=2), "intermediate_size=97"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 33},
            place(tensor=2),
            "experts' intermediate size=33",
        ),
        (
            "llama",
            {"num_layers": 2},
            place(pipeline=3),
            "pipeline_parallel_size=3 is more than num_hidden_layers=2",
        ),
    ],
)
def test_sizes_that_cannot_be_split_are_refused_with_the_field_in_the_message(
    arch: str, sizes: dict[str, int], context: ParallelContext, message: str, tmp_path: Path
) -> None:
    path = create_checkpoint(tmp_path / "model", arch, **{**SMALL, **sizes})
    for attempt in (
        lambda: shard(load_checkpoint_config(path), context),
        lambda: load(path, context),
    ):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        assert caught.value.reason == "InvalidConfig"
        assert message in caught.value.message


def test_an_odd_intermediate_size_is_accepted_without_dense_layers(tmp_path: Path) -> None:
    """Only dense layers use intermediate_size."""
    path = create_checkpoint(tmp_path / "model", "qwen3_moe", **{**SMALL, "intermediate_size": 97})
    assert shard(load_checkpoint_config(path), place(tensor=2)).num_heads == 2


class CountingFile:
    """A safetensors file that counts the bytes read from it."""

    num_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = safetensors.safe_open(*args, **kwargs)

    def __enter__(self) -> CountingFile:
        self._open = self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def get_slice(self, name: str) -> CountingFile:
        self._slice = self._open.get_slice(name)
        return self

    def __getitem__(self, index: Any) -> torch.Tensor:
        taken: torch.Tensor = self._slice[index]
        CountingFile.num_bytes += taken.nbytes
        return taken


@pytest.mark.parametrize("arch", ["llama", "mixtral"])
def test_a_rank_reads_only_its_share_of_the_checkpoint(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = create_checkpoint(
        tmp_path / "model", arch, max_shard_size=200_000, **{**SMALL, "num_layers": 4}
    )
    monkeypatch.setattr(loader, "safe_open", CountingFile)
    whole = sum(
        tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values()
    )

    def bytes_read(context: ParallelContext) -> int:
        CountingFile.num_bytes = 0
        load(path, context)
        return CountingFile.num_bytes

    assert bytes_read(place()) == whole
    assert whole / 2 <= bytes_read(place(tensor=2, tensor_rank=1)) < 0.52 * whole
    stages = [bytes_read(place(pipeline=2, stage=stage)) for stage in range(2)]
    assert sum(stages) == whole
    assert max(stages) < 0.6 * whole


def test_the_slices_of_all_ranks_together_are_the_checkpoint(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "qwen2", **SMALL)
    tensors = load_file(path / "model.safetensors")
    halves = [load(path, place(tensor=2, tensor_rank=rank)).weight_targets() for rank in range(2)]
    for name, tensor in tensors.items():
        parts = [half[name].parameter for half in halves]
        if parts[0].shape == tensor.shape:
            assert all(torch.equal(part, tensor) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts, dim=halves[0][name].dim), tensor), name


def drop_a_row(weights: dict[str, torch.Tensor], name: str) -> None:
    weights[name] = weights[name][:-1].clone()


@pytest.mark.parametrize(
    "context",
    [place(tensor=2, tensor_rank=1), place(pipeline=2, stage=0)],
    ids=["tensor", "stage"],
)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights, name: weights.pop(name), "is missing"),
        (lambda weights, name: weights.update({name + ".extra": torch.zeros(1)}), "is unexpected"),
        (drop_a_row, "has shape (63, 96), expected (64, 96)"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_every_rank_reports_an_invalid_tensor_even_of_another_stage(
    edit: Callable[[dict[str, torch.Tensor], str], object],
    message: str,
    context: ParallelContext,
    tmp_path: Path,
) -> None:
    """Otherwise the ranks without the error would wait for the one that failed."""
    path = create_checkpoint(tmp_path / "model", "llama", **SMALL)
    file, name = path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    weights = load_file(file)
    edit(weights, name)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelInvalid) as caught:
        load(path, context)
    assert str(file) in caught.value.message
    assert name in caught.value.message
    assert message in caught.value.message


def test_every_rank_names_the_truncated_file_and_a_tensor(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", **SMALL)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for rank in range(2):
        with pytest.raises(
            ModelInvalid, match=r"model.safetensors is truncated: tensor \S+ ends past the end"
        ):
            load(path, place(tensor=2, tensor_rank=rank))


def test_show_progress_prints_a_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", **SMALL)
    arguments = (path, load_checkpoint_config(path), torch.float32, torch.device("cpu"))
    load_model(*arguments)
    assert capsys.readouterr().err == ""
    load_model(*arguments, show_progress=True)
    shown = capsys.readouterr().err
    assert "Loading weights" in shown
    assert "100%" in shown


def test_the_tensor_index_has_the_offset_of_each_tensor_in_its_file(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "mixtral", max_shard_size=200_000, **SMALL)
    for name, entry in loader.read_tensor_index(path).items():
        tensor = load_file(entry.file)[name]
        content = entry.file.read_bytes()[entry.offset : entry.offset + tensor.nbytes]
        assert content == tensor.flatten().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(("dim", "expected"), [(0, slice(8, 24)), (1, slice(0, 64))])
def test_read_ahead_reads_the_rows_of_the_slice(
    dim: int, expected: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of columns needs all rows."""
    tensor = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
    save_file({"other": torch.zeros(100), "w": tensor}, tmp_path / "model.safetensors")
    preadv, parts = os.preadv, []

    def record(fd: int, buffers: list[bytearray], offset: int) -> int:
        num_read = preadv(fd, buffers, offset)
        parts.append((offset, num_read))
        return num_read

    monkeypatch.setattr(os, "preadv", record)
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 500)
    entries = loader.read_tensor_index(tmp_path)
    parameter = tensor[8:24] if dim == 0 else tensor[:, 8:24]
    loader.read_ahead(entries, {"w": WeightTarget(parameter, (64, 32), dim, 8)})
    first = entries["w"].offset + expected.start * 128
    last = entries["w"].offset + expected.stop * 128
    assert parts[0][0] == first
    assert all(one[0] + one[1] == other[0] for one, other in itertools.pairwise(parts))
    assert last <= sum(parts[-1]) < last + 500
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match="tensor w cannot be read"):
        loader.read_ahead(entries, {"w": WeightTarget(parameter, (64, 32), dim, 8)})
