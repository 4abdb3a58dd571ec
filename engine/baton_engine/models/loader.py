"""Checks the tensors of a safetensors checkpoint, and loads them into a model's parameters.

For each tensor, a model's `weight_targets` name the slice to read and the parameter to fill.
Therefore this file has no code for fused parameters (QKV, gate and up, stacked experts) or split
models.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from baton_engine.metrics.load_counter import COUNTER
from baton_engine.models.checkpoint_config import CONFIG_FILE
from baton_engine.models.errors import ModelInvalid
from baton_engine.models.sharding import WeightTarget

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 8  # at the start of a safetensors file: length of the header
READ_AHEAD_BYTES = 1 << 20  # size of one read of `read_ahead`
IDENTITY_PAGES = 256  # sampled pages per file
IDENTITY_PAGE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """Location, dtype and shape of one tensor in a safetensors file."""

    file: Path
    dtype: str  # name in safetensors, such as BF16
    shape: tuple[int, ...]
    offset: int  # position of the tensor's first byte in the file

    @property
    def item_bytes(self) -> int:
        return FLOAT_BYTES[self.dtype]


def read_tensor_index(path: Path) -> dict[str, TensorEntry]:
    """Return a `TensorEntry` for each tensor name of the checkpoint in folder `path`.

    Only the headers of the files are read.

    Raises:
        ModelInvalid: a file or tensor, named in the message, is missing, truncated or malformed.
    """
    index_file = path / INDEX_FILE
    if not index_file.exists():
        if not (path / SINGLE_FILE).exists():
            raise ModelInvalid(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return _read_file(path / SINGLE_FILE)
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelInvalid(f"{index_file} cannot be read: {error!r}") from None
    files = {name: _read_file(path / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise ModelInvalid(
                f"{path / name}: tensor {tensor} is missing, though {INDEX_FILE} says it is there"
            )
    return {tensor: files[name][tensor] for tensor, name in weight_map.items()}


def identity_files(path: Path) -> dict[str, bytes]:
    """Return bytes that identify the checkpoint in folder `path`, by file name.

    config.json and the index are returned whole. A weight file is represented by its header and
    IDENTITY_PAGES pages, spread evenly over the file. The pages distinguish checkpoints with equal
    shapes.

    Raises:
        ModelInvalid: a file is missing or has no header.
    """
    weight_files = sorted({entry.file for entry in read_tensor_index(path).values()})
    identity = {file.name: _read_header(file) + _read_samples(file) for file in weight_files}
    for name in (CONFIG_FILE, INDEX_FILE):
        if (path / name).exists():
            identity[name] = (path / name).read_bytes()
    return identity


def load_weights(
    path: Path,
    targets: Mapping[str, WeightTarget],
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Iterable[str],
    show_progress: bool,
) -> int:
    """Check the checkpoint in `path`, then copy slices of its tensors into parameters.

    Values are converted to the dtype of the parameter.

    Args:
        path: folder of the checkpoint.
        targets: for each tensor name, the slice to read and the parameter to fill.
        expected: shape of each tensor that the checkpoint must contain, by name.
        ignored: names of tensors that the checkpoint may contain in addition.
        show_progress: whether to show a progress bar of the bytes read on stderr.

    Returns:
        The number of bytes read.

    Raises:
        ModelInvalid: a tensor, named in the message with its file, is missing, unexpected or
            truncated, or has the wrong shape or type.
    """
    entries = read_tensor_index(path)
    _check_tensors(path, entries, expected, set(ignored))
    return read_slices(entries, targets, show_progress=show_progress)


def read_slices(
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, WeightTarget],
    *,
    show_progress: bool = False,
) -> int:
    """Copy slices of a checkpoint's tensors into parameters. Only these slices are read.

    Values are converted to the dtype of the parameter.

    Args:
        entries: all tensors of the checkpoint. The caller has checked their names and shapes.
        targets: for each tensor name, the slice to read and the parameter to fill.
        show_progress: whether to show a progress bar of the bytes read on stderr.

    Returns:
        The number of bytes read.

    Raises:
        ModelInvalid: a tensor, named in the message with its file, cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(entries[name].file, []).append(name)
    total = sum(
        target.parameter.numel() * entries[name].item_bytes for name, target in targets.items()
    )
    with (
        torch.no_grad(),
        tqdm(
            total=total,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            disable=not show_progress,
        ) as progress,
    ):
        COUNTER.begin(total)
        for file, names in by_file.items():
            _load_file(file, names, targets, progress)
    return total


def read_ahead(entries: Mapping[str, TensorEntry], targets: Mapping[str, WeightTarget]) -> None:
    """Read the slices of `targets` into the operating system's page cache.

    Call this function before `read_slices`, which holds the GIL while it waits for the disk. This
    function releases the GIL, so that other threads continue.

    Raises:
        ModelInvalid: a file cannot be read.
    """
    buffer = bytearray(READ_AHEAD_BYTES)
    for name, target in targets.items():
        entry = entries[name]
        row_bytes = math.prod(entry.shape[1:]) * entry.item_bytes
        # A slice of a later dimension has a part in every row, so all rows are read.
        rows = target.index[0] if target.dim == 0 else slice(0, entry.shape[0])
        at, end = (entry.offset + row * row_bytes for row in (rows.start, rows.stop))
        try:
            with entry.file.open("rb", buffering=0) as file:
                while at < end and (num_read := os.preadv(file.fileno(), [buffer], at)):
                    at += num_read
        except OSError as error:
            raise ModelInvalid(f"{entry.file}: tensor {name} cannot be read: {error}") from None


def _check_tensors(
    path: Path,
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    unwanted: set[str],
) -> None:
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is None:
            source = path / (INDEX_FILE if (path / INDEX_FILE).exists() else SINGLE_FILE)
            raise ModelInvalid(f"{source}: tensor {name} is missing; the architecture needs it")
        if entry.shape != shape:
            raise ModelInvalid(
                f"{entry.file}: tensor {name} has shape {entry.shape}, expected {shape}"
            )
        if entry.dtype not in FLOAT_BYTES:
            raise ModelInvalid(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}, "
                f"expected one of {sorted(FLOAT_BYTES)}"
            )
    for name, entry in entries.items():
        # Old Llama checkpoints contain the rotary frequencies, which are computed from config.json.
        if (
            name not in expected
            and name not in unwanted
            and not name.endswith("rotary_emb.inv_freq")
        ):
            raise ModelInvalid(
                f"{entry.file}: tensor {name} is unexpected; the architecture has no place for it"
            )


def _load_file(
    file: Path, names: Iterable[str], targets: Mapping[str, WeightTarget], progress: tqdm[NoReturn]
) -> None:
    name = ""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                # The file is memory-mapped, so only the slice's pages are read.
                values = tensors.get_slice(name)[targets[name].index]
                targets[name].parameter.copy_(values)
                progress.update(values.nbytes)
                COUNTER.add(values.nbytes)
    except (SafetensorError, OSError) as error:
        where = f"tensor {name} " if name else ""
        raise ModelInvalid(f"{file}: {where}cannot be read: {error}") from None


def _read_samples(file: Path) -> bytes:
    size = file.stat().st_size
    last = max(0, size - IDENTITY_PAGE_BYTES)
    pages = []
    with file.open("rb") as stream:
        for i in range(IDENTITY_PAGES):
            stream.seek(last * i // (IDENTITY_PAGES - 1))
            pages.append(stream.read(IDENTITY_PAGE_BYTES))
    return b"".join(pages)


def _read_header(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise ModelInvalid(f"{file} is truncated: it has no safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > file.stat().st_size - _LENGTH_BYTES:
                raise ModelInvalid(f"{file} is truncated inside its header")
            return stream.read(length)
    except FileNotFoundError:
        raise ModelInvalid(f"{file} is missing") from None
    except OSError as error:
        raise ModelInvalid(f"{file} cannot be read: {error}") from None


def _read_file(file: Path) -> dict[str, TensorEntry]:
    header_bytes = _read_header(file)
    data_bytes = file.stat().st_size - _LENGTH_BYTES - len(header_bytes)
    entries: dict[str, TensorEntry] = {}
    try:
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        for name, info in header.items():
            if info["data_offsets"][1] > data_bytes:
                raise ModelInvalid(
                    f"{file} is truncated: tensor {name} ends past the end of the file"
                )
            offset = _LENGTH_BYTES + len(header_bytes) + info["data_offsets"][0]
            entries[name] = TensorEntry(file, info["dtype"], tuple(info["shape"]), offset)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelInvalid(f"{file} has a malformed safetensors header: {error!r}") from None
    return entries
