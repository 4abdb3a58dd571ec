"""Where a model's files come from."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """One file as the source describes it."""

    name: str
    """Relative to the model's folder."""
    size: int
    digest: str = ""
    """`sha256:`, `git-sha1:` (of git's blob) or `md5:` and hex digits; empty: the source says nothing that could be checked."""


@dataclass(frozen=True)
class Listing:
    """All files of a model at one revision."""

    revision: str
    """Names the content: a commit, or a hash over what an object store says of its objects."""
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """A model at its source."""

    def listing(self) -> Listing:
        """Raises FetchError, TransientError."""

    def read(self, file: RemoteFile, revision: str, target: io.BufferedIOBase, offset: int) -> None:
        """Appends the file's bytes from `offset` on to `target`. What was written before an error counts.

        Raises:
            FetchError, TransientError, OSError (of `target`).
        """


def verify(path: Path, file: RemoteFile) -> str:
    """What is wrong with the local copy; empty if nothing that the source lets us see."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes instead of {file.size}"
    kind, _, expected = file.digest.partition(":")
    if not expected:
        return ""
    digest = hashlib.new({"git-sha1": "sha1"}.get(kind, kind), usedforsecurity=kind == "sha256")
    if kind == "git-sha1":
        digest.update(f"blob {size}\0".encode())
    with path.open("rb") as content:
        while chunk := content.read(_BUFFER_BYTES):
            digest.update(chunk)
    actual = digest.hexdigest()
    return "" if actual == expected else f"its {kind} is {actual} instead of {expected}"
