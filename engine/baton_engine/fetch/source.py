"""The interface of a model source, and the verification of downloaded files."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class RemoteFile:
    """One file of a model, as the source lists it."""

    #: Path relative to the model's folder.
    name: str
    size: int
    #: `sha256:`, `git-sha1:` (a git blob) or `md5:` and hex digits. Empty if the source has none.
    digest: str = ""


@dataclass(frozen=True)
class Listing:
    """All files of a model at one revision."""

    #: A commit, or a hash over the listing of an object store.
    revision: str
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """A model on a hub or in an object store."""

    def listing(self) -> Listing:
        """Return the revision and all files of the model.

        Raises:
            FetchError: a retry does not help.
            TransientError: a retry may help.
        """

    def read(self, file: RemoteFile, revision: str, target: io.BufferedIOBase, offset: int) -> None:
        """Append the bytes of a file from `offset` on to `target`.

        Bytes that were appended before an error are valid, so a retry can continue after them.

        Raises:
            FetchError: a retry does not help.
            TransientError: a retry may help.
            OSError: `target` is not writable.
        """


def verify(path: Path, file: RemoteFile) -> str:
    """Compare a downloaded file with the size and digest that the source lists.

    Returns:
        A description of the difference. Empty if there is none.
    """
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
