"""The interface of a model source."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Protocol


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
        """Read a file from byte `offset` to the end, and append the bytes to `target`.

        Bytes that were appended before an error are valid, so a retry can continue after them.

        Raises:
            FetchError: a retry does not help.
            TransientError: a retry may help.
            OSError: `target` is not writable.
        """
