"""One attack: a change of a sound checkpoint's folder.

For the tests of all readers of checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: Levels of nested JSON. A parser must refuse this depth.
DEPTH = 200_000
GIB = 2**30


@dataclass(frozen=True)
class Attack:
    """Damages one file of a checkpoint.

    Args:
        name: id of the test case.
        file: the file, which every error must name.
        damage: changes the file at this path.
        message: a part of the error.
    """

    name: str
    file: str
    damage: Callable[[Path], object]
    message: str

    def apply(self, folder: Path) -> None:
        self.damage(folder / self.file)


def parametrize(attacks: Iterable[Attack]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "attack", [pytest.param(attack, id=attack.name) for attack in attacks]
    )


def content(data: bytes | str) -> Callable[[Path], object]:
    """Return a damage that replaces the file's content."""
    return lambda path: path.write_bytes(data.encode() if isinstance(data, str) else data)


def fields(**changes: Any) -> Callable[[Path], object]:
    """Return a damage that sets fields of the JSON object in the file."""

    def damage(path: Path) -> None:
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | changes))

    return damage


def nested(before: str = "", after: str = "") -> Callable[[Path], object]:
    return content(before + "[" * DEPTH + "]" * DEPTH + after)


def sparse(path: Path) -> None:
    """Make the file one GiB long. The file takes no space on disk."""
    path.touch()
    os.truncate(path, GIB)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def link_to(target: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return damage


def move_out(path: Path) -> None:
    """Replace the file by a link to its content, which is moved to the parent folder."""
    outside = path.parent.parent / f"outside-{path.name}"
    if path.exists():
        shutil.move(path, outside)
    else:
        outside.write_text("{}")
    path.symlink_to(outside)


def file_attacks(file: str) -> list[Attack]:
    """Return the attacks that need no knowledge of the file's content."""
    kinds = [
        Attack("fifo", file, fifo, "not a regular file"),
        Attack("folder", file, folder, "not a regular file"),
        Attack("device", file, link_to("/dev/zero"), "outside of the model's folder"),
        Attack("link-out", file, move_out, "outside of the model's folder"),
        Attack("link-relative", file, link_to("../" * 20 + "etc/passwd"), "outside of"),
        Attack("link-loop", file, link_to(file), "cannot be read"),
    ]
    return [Attack(f"{file}-{each.name}", file, each.damage, each.message) for each in kinds]
