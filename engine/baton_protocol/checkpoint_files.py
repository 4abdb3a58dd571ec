"""Reads files of a checkpoint's folder, which is untrusted.

Whatever a file's name, link, size or content is, these functions read only inside the folder, do
not block, and use bounded memory.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

#: Limit on config.json, generation_config.json, tokenizer_config.json and a chat template. The
#: largest known files of this kind have a few megabytes.
MAX_CONFIG_BYTES = 2**24
#: Limit on tokenizer.json. The largest known files have some 35 MB.
MAX_TOKENIZER_BYTES = 2**27
#: Limit on token ids, because a table of tokens has an entry for each id up to the largest.
MAX_TOKEN_ID = 2**22


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of a checkpoint's folder.

    A link may lead to another file in the folder. If the folder is a snapshot of a
    `huggingface_hub` cache (`snapshots/<commit>`), or lies below a snapshot, a link may also lead
    to the cache's `blobs`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: `name` is not the bare name of a file, a link leads elsewhere, or the file is
            not a regular file or cannot be read. The message names the file.
    """
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(f"{folder}: {name!r} is not the name of a file in this folder")
    path = folder / name
    try:
        target = path.resolve(strict=True)
        if not any(target.is_relative_to(root) for root in _roots(folder.resolve())):
            raise ValueError(
                f"{path} is a link to {target}, outside of the model's folder; "
                "copy the file into the folder"
            )
        if not target.is_file():  # opening a device can have an effect
            raise ValueError(f"{path} is not a regular file")
        # During these checks, another process may replace the file or one of its parent folders.
        fd = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file = os.fdopen(fd, "rb")
        opened = os.readlink(path_of(file))
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # Path.resolve raises RuntimeError for a loop
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode) or opened != str(target):
        file.close()
        raise ValueError(f"{path} is not a regular file, or was replaced while it was opened")
    return file


def path_of(file: BinaryIO) -> str:
    """Return a path of an open file that remains valid when the file is renamed or replaced.

    A library that opens this path reads the same file, even if another file now has its name.
    """
    return f"/proc/self/fd/{file.fileno()}"


def read_file(folder: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Return the content of a file of a checkpoint's folder.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: as for `open_file`, or the file is larger than `max_bytes`.
    """
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(
                f"{folder / name} has {size} bytes; at most {max_bytes} bytes are read"
            )
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise ValueError(f"{folder / name} cannot be read: {error}") from None


def read_json(folder: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint's folder.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: as for `read_file`, or the content is not a JSON object.
    """
    content = read_file(folder, name, max_bytes)
    try:
        return parse_object(content)
    except ValueError as error:
        raise ValueError(f"{folder / name} cannot be read: {error}") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`.

    Raises:
        ValueError: as for `parse_json`, or the outermost value is not an object.
    """
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it must hold a JSON object")
    return value


def parse_json(content: bytes) -> Any:
    """Return the JSON value in `content`.

    Raises:
        ValueError: the content is not UTF-8 or not JSON, an object has two entries with the same
            name, or the values are nested too deeply.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} occurs twice in one object")
            seen.add(name)
    return value


def _roots(folder: Path) -> list[Path]:
    """Return the folders in which a checkpoint's file may lie after its links are resolved."""
    snapshots = next((each for each in folder.parents if each.name == "snapshots"), None)
    return [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
