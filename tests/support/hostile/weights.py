"""Attacks by the weights of a checkpoint and their index. For the tests of the loader and LLM."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hostile.attack import DEPTH, Attack, content, file_attacks, nested, sparse

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


def header(text: bytes | str, data: bytes = b"") -> Callable[[Path], object]:
    """Return a damage that writes a weight file with this header and data."""
    raw = text.encode() if isinstance(text, str) else text
    return content(struct.pack("<Q", len(raw)) + raw + data)


def tensors(data: bytes = bytes(16), **entries: Any) -> Callable[[Path], object]:
    """Return a damage that writes tensors `a`, `b`, ... as (dtype, shape, data_offsets)."""
    fields = ("dtype", "shape", "data_offsets")
    return header(
        json.dumps(
            {name: dict(zip(fields, entry, strict=True)) for name, entry in entries.items()}
        ),
        data,
    )


def first_tensor(**changes: Any) -> Callable[[Path], object]:
    """Return a damage that changes the header of a tensor in an otherwise sound file."""

    def damage(path: Path) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        entries[EMBEDDING] |= changes
        header(json.dumps(entries), raw[8 + length :])(path)

    return damage


def long_header(path: Path) -> None:
    """Write a header that is one byte above the limit. The file takes no space on disk."""
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 8 + 100_000_001)


def index(**content_of_index: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(content_of_index))


def many_files(path: Path) -> None:
    index(weight_map={f"t{i}": f"f{i}.safetensors" for i in range(1025)})(path)


def half_headers(path: Path) -> None:
    """Write two weight files whose headers together are above the limit."""
    index(weight_map={"a": "a.safetensors", "b": "b.safetensors"})(path)
    entry = '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    for name in ("a", "b"):
        header(entry + " " * 60_000_000 + "}")(path.with_name(f"{name}.safetensors"))


ENTRY = '{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'

WEIGHT_ATTACKS = [
    *file_attacks(WEIGHTS),
    Attack("header-length", WEIGHTS, content(b"\xff" * 64), "truncated"),
    Attack("header-long", WEIGHTS, long_header, "100000001 bytes"),
    Attack("header-not-utf8", WEIGHTS, header(b'{"\xff\xfe": 1}'), "malformed"),
    Attack("header-utf16", WEIGHTS, header("{}".encode("utf-16")), "malformed"),
    Attack("header-deep", WEIGHTS, header("[" * DEPTH + "]" * DEPTH), "nested too deeply"),
    Attack("header-list", WEIGHTS, header("[]"), "malformed"),
    Attack("header-many", WEIGHTS, header('{"a": [' + "[]," * 4_000_000 + "0]}"), "arrays and"),
    Attack("twice", WEIGHTS, header(f'{{"a":{ENTRY},"a":{ENTRY}}}', bytes(16)), "occurs twice"),
    Attack("entry-number", WEIGHTS, header('{"a": 1}'), "malformed"),
    Attack("entry-empty", WEIGHTS, header('{"a": {}}'), "malformed"),
    Attack("dtype-list", WEIGHTS, tensors(a=([], [4], [0, 16])), "dtype must be a name"),
    Attack("dtype-wrong", WEIGHTS, tensors(a=("F16", [4], [0, 16])), "cannot have 16 bytes"),
    Attack("shape-null", WEIGHTS, tensors(a=("F32", None, [0, 16])), "shape must hold"),
    Attack("shape-negative", WEIGHTS, tensors(a=("F32", [-1, -4], [0, 16])), "shape must hold"),
    Attack("shape-huge", WEIGHTS, tensors(a=("F32", [2**62], [0, 16])), "cannot have 16 bytes"),
    Attack("shape-beyond", WEIGHTS, tensors(a=("F32", [10**30, 0], [0, 0])), "shape must hold"),
    Attack("shape-float", WEIGHTS, tensors(a=("F32", [4.0], [0, 16])), "shape must hold"),
    Attack("shape-bool", WEIGHTS, tensors(a=("F32", [True] * 2, [0, 4])), "shape must hold"),
    Attack(
        "shape-long", WEIGHTS, tensors(a=("F32", [2**62] * 10**6, [0, 16])), "1000000 dimensions"
    ),
    Attack("shape-other", WEIGHTS, first_tensor(shape=[1, 2]), EMBEDDING),
    Attack("offsets-negative", WEIGHTS, tensors(a=("F32", [4], [-16, 0])), "data_offsets must"),
    Attack("offsets-reversed", WEIGHTS, tensors(a=("F32", [4], [16, 0])), "data_offsets must"),
    Attack("offsets-three", WEIGHTS, tensors(a=("F32", [4], [0, 16, 16])), "data_offsets must"),
    Attack("offsets-beyond", WEIGHTS, tensors(a=("F32", [8], [0, 32])), "truncated"),
    Attack(
        "offsets-overlap",
        WEIGHTS,
        tensors(a=("F32", [4], [0, 16]), b=("F32", [2], [8, 16])),
        "two tensors",
    ),
    Attack("offsets-hole", WEIGHTS, tensors(a=("F32", [2], [8, 16])), "no tensor"),
    Attack("offsets-tail", WEIGHTS, tensors(a=("F32", [2], [0, 8])), "no tensor"),
    Attack("zeros", WEIGHTS, sparse, "malformed"),
]

INDEX_ATTACKS = [
    *file_attacks(INDEX),
    Attack("index-absolute", INDEX, index(weight_map={"a": "/etc/passwd"}), "'/etc/passwd'"),
    Attack("index-parent", INDEX, index(weight_map={"a": "../x.safetensors"}), "'../x"),
    Attack("index-subfolder", INDEX, index(weight_map={"a": "x/y.safetensors"}), "'x/y"),
    Attack("index-dots", INDEX, index(weight_map={"a": ".."}), "'..'"),
    Attack("index-empty-name", INDEX, index(weight_map={"a": ""}), "''"),
    Attack("index-nul", INDEX, index(weight_map={"a": "x\0y"}), r"'x\x00y'"),
    Attack("index-surrogate", INDEX, index(weight_map={"a": "\ud800"}), r"'\ud800'"),
    Attack("index-long-name", INDEX, index(weight_map={"a": "x" * 5000}), "cannot be read"),
    Attack("index-number", INDEX, index(weight_map={"a": 1}), "names of files"),
    Attack("index-list-name", INDEX, index(weight_map={"a": ["b"]}), "names of files"),
    Attack("index-list", INDEX, index(weight_map=["a"]), "weight_map must"),
    Attack("index-empty", INDEX, index(weight_map={}), "weight_map must"),
    Attack("index-missing", INDEX, index(), "weight_map is missing"),
    Attack("index-many", INDEX, many_files, "1025 weight files"),
    Attack("index-headers", INDEX, half_headers, "the headers of a checkpoint"),
    Attack("index-deep", INDEX, nested('{"weight_map":', "}"), "nested too deeply"),
    Attack("index-not-utf8", INDEX, content(b"\xff\xfe"), "cannot be read"),
    Attack("index-large", INDEX, sparse, "1073741824 bytes"),
]
