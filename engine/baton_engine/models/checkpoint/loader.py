"""Checks the tensors of a safetensors checkpoint, and loads them into a model's parameters.

For each tensor, a model's `weight_targets` name the slice to read and the parameter to fill.
Therefore this file has no code for fused parameters (QKV, gate and up, stacked experts) or split
models.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from baton_engine.metrics.load_counter import COUNTER
from baton_engine.models.checkpoint.checkpoint_config import CONFIG_FILE
from baton_engine.models.checkpoint.sharding import WeightTarget
from baton_engine.models.errors import ModelInvalid
from baton_protocol.checkpoint_files import (
    open_file,
    parse_object,
    path_of,
    read_file,
    read_json,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
#: Limit on the index, and on the headers of all weight files together. The library has the same
#: limit on one header.
MAX_HEADER_BYTES = 100_000_000
#: Limit on the number of JSON arrays and objects in a header. Each tensor has three of them.
MAX_HEADER_VALUES = 3 * 2**20
MAX_WEIGHT_FILES = 1024
_MAX_DIMENSIONS = 8
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
    if not os.path.lexists(index_file):
        if not os.path.lexists(path / SINGLE_FILE):
            raise ModelInvalid(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return _read_file(path, SINGLE_FILE, MAX_HEADER_BYTES)[0]
    weight_map = _read_weight_map(path)
    files: dict[str, dict[str, TensorEntry]] = {}
    left = MAX_HEADER_BYTES
    for name in sorted(set(weight_map.values())):
        files[name], header_bytes = _read_file(path, name, left)
        left -= header_bytes
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
    names = sorted({entry.file.name for entry in read_tensor_index(path).values()})
    try:
        identity = {name: _read_header(path, name)[0] + _read_samples(path, name) for name in names}
        for name in (CONFIG_FILE, INDEX_FILE):
            if (path / name).exists():
                identity[name] = read_file(path, name, MAX_HEADER_BYTES)
    except (OSError, ValueError) as error:
        raise ModelInvalid(str(error)) from None
    return identity


def check_weights(
    path: Path,
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str],
) -> None:
    """Check the names, shapes and types of a checkpoint's tensors.

    Args:
        path: folder of the checkpoint.
        entries: all tensors of the checkpoint, from `read_tensor_index`.
        expected: shape of each tensor that the checkpoint must contain, by name.
        ignored: names of tensors that the checkpoint may contain in addition.

    Raises:
        ModelInvalid: a tensor, named in the message with its file, is missing or unexpected, or has
            the wrong shape or type.
    """
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
            and name not in ignored
            and not name.endswith("rotary_emb.inv_freq")
        ):
            raise ModelInvalid(
                f"{entry.file}: tensor {name} is unexpected; the architecture has no place for it"
            )


def read_slices(
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, WeightTarget],
    *,
    show_progress: bool = False,
) -> None:
    """Copy slices of a checkpoint's tensors into parameters. Only these slices are read.

    Values are converted to the dtype of the parameter.

    Args:
        entries: all tensors of the checkpoint, from `read_tensor_index`.
        targets: for each tensor name, the slice to read and the parameter to fill.
        show_progress: whether to show a progress bar of the bytes read on stderr.

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
            with open_file(entry.file.parent, entry.file.name) as file:
                while at < end and (num_read := os.preadv(file.fileno(), [buffer], at)):
                    at += num_read
        except (OSError, ValueError) as error:
            raise ModelInvalid(f"{entry.file}: tensor {name} cannot be read: {error}") from None


def _load_file(
    file: Path, names: Iterable[str], targets: Mapping[str, WeightTarget], progress: tqdm[NoReturn]
) -> None:
    name = ""
    try:
        with (
            open_file(file.parent, file.name) as stream,
            safe_open(path_of(stream), framework="pt") as tensors,
        ):
            for name in names:
                # The file is memory-mapped, so only the slice's pages are read.
                values = tensors.get_slice(name)[targets[name].index]
                targets[name].parameter.copy_(values)
                progress.update(values.nbytes)
                COUNTER.add(values.nbytes)
    # torch raises RuntimeError, and `open_file` ValueError.
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        where = f"tensor {name} " if name else ""
        raise ModelInvalid(f"{file}: {where}cannot be read: {error}") from None


def _read_samples(path: Path, name: str) -> bytes:
    pages = []
    with open_file(path, name) as stream:
        last = max(0, os.fstat(stream.fileno()).st_size - IDENTITY_PAGE_BYTES)
        for i in range(IDENTITY_PAGES):
            stream.seek(last * i // (IDENTITY_PAGES - 1))
            pages.append(stream.read(IDENTITY_PAGE_BYTES))
    return b"".join(pages)


def _read_weight_map(path: Path) -> dict[str, str]:
    """Read the index file. Return the name of each tensor's weight file, by tensor name."""
    index_file = path / INDEX_FILE
    try:
        weight_map = read_json(path, INDEX_FILE, MAX_HEADER_BYTES)["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index_file} cannot be read: weight_map must name the tensors")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index_file} cannot be read: weight_map must hold names of files")
    except KeyError:
        raise ModelInvalid(f"{index_file} cannot be read: weight_map is missing") from None
    except (OSError, ValueError) as error:
        raise ModelInvalid(str(error)) from None
    if (num_files := len(set(weight_map.values()))) > MAX_WEIGHT_FILES:
        raise ModelInvalid(
            f"{index_file} names {num_files} weight files; at most {MAX_WEIGHT_FILES} are read"
        )
    return weight_map


def _read_header(path: Path, name: str, max_bytes: int = MAX_HEADER_BYTES) -> tuple[bytes, int]:
    """Return the header of a weight file, and the number of bytes after it."""
    file = path / name
    with open_file(path, name) as stream:
        prefix = stream.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise ModelInvalid(f"{file} is truncated: it has no safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        left = os.fstat(stream.fileno()).st_size - _LENGTH_BYTES - length
        if left < 0:
            raise ModelInvalid(f"{file} is truncated inside its header")
        if length > max_bytes:
            raise ModelInvalid(
                f"{file} has a header of {length} bytes; the headers of a checkpoint may have "
                f"{MAX_HEADER_BYTES} bytes together"
            )
        return stream.read(length), left


def _read_file(path: Path, name: str, max_bytes: int) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors of a weight file by name, and the size of its header in bytes."""
    file = path / name
    try:
        header_bytes, data_bytes = _read_header(path, name, max_bytes)
        start = _LENGTH_BYTES + len(header_bytes)
    except FileNotFoundError:
        raise ModelInvalid(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelInvalid(str(error)) from None
    entries: dict[str, TensorEntry] = {}
    spans: list[tuple[int, int]] = []
    try:
        if header_bytes.count(b"[") + header_bytes.count(b"{") > MAX_HEADER_VALUES:
            raise ValueError(f"it has more than {MAX_HEADER_VALUES} arrays and objects")
        header = parse_object(header_bytes)
        header.pop("__metadata__", None)
        for tensor, info in header.items():
            begin, end = _read_span(tensor, info)
            if end > data_bytes:
                raise ModelInvalid(
                    f"{file} is truncated: tensor {tensor} ends past the end of the file"
                )
            spans.append((begin, end))
            entries[tensor] = TensorEntry(file, info["dtype"], tuple(info["shape"]), start + begin)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelInvalid(f"{file} has a malformed safetensors header: {error}") from None
    # The format requires that each byte of the data belongs to exactly one tensor.
    at = 0
    for begin, end in [*sorted(spans), (data_bytes, data_bytes)]:
        if begin != at:
            owners = "two tensors" if begin < at else "no tensor"
            raise ModelInvalid(
                f"{file} has a malformed safetensors header: byte {min(begin, at)} of the data "
                f"belongs to {owners}"
            )
        at = end
    return entries, len(header_bytes)


def _read_span(tensor: str, info: dict[str, Any]) -> tuple[int, int]:
    """Check a tensor's header entry. Return the (begin, end) offsets of its data.

    The offsets are relative to the byte after the file's header.

    Raises:
        ValueError, KeyError, TypeError: the entry is malformed.
    """
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {tensor}: dtype must be a name")
    for name, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(
            type(value) is int and 0 <= value < 2**63 for value in values
        ):
            raise ValueError(f"tensor {tensor}: {name} must hold integers from 0 to 2^63 - 1")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {tensor} has {len(shape)} dimensions, above {_MAX_DIMENSIONS}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {tensor}: data_offsets must be where the tensor begins and ends")
    begin, end = offsets
    # Tensors of other types are never read.
    if dtype in FLOAT_BYTES and math.prod(shape) * FLOAT_BYTES[dtype] != end - begin:
        raise ValueError(
            f"tensor {tensor} of shape {tuple(shape)} and dtype {dtype} cannot have "
            f"{end - begin} bytes"
        )
    return begin, end
