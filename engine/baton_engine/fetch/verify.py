"""Verifies downloaded files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton_engine.fetch.sources.source import RemoteFile

_BUFFER_BYTES = 2**20


def verify(path: Path, file: RemoteFile) -> str:
    """Compare a downloaded file with the size and digest that the source lists.

    If the source lists no digest, only the size is compared.

    Returns:
        A description of the difference, or an empty string if the file is as listed.
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
