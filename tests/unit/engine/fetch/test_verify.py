"""The check of downloaded files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from baton_engine.fetch.sources.source import RemoteFile
from baton_engine.fetch.verify import verify

CONTENT = b"weights" * 300_000  # more than one buffer
DIGESTS = {
    "sha256": hashlib.sha256(CONTENT).hexdigest(),
    "md5": hashlib.md5(CONTENT, usedforsecurity=False).hexdigest(),
    "git-sha1": hashlib.sha1(
        b"blob %d\0" % len(CONTENT) + CONTENT, usedforsecurity=False
    ).hexdigest(),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("kind", DIGESTS)
def test_a_file_with_the_listed_digest_is_accepted_and_a_changed_one_is_not(
    path: Path, kind: str
) -> None:
    file = RemoteFile("file", len(CONTENT), f"{kind}:{DIGESTS[kind]}")
    assert verify(path, file) == ""
    path.write_bytes(CONTENT[:-1] + b"S")
    assert verify(path, file).startswith(f"its {kind} is ")


def test_the_size_is_compared_if_there_is_no_digest(path: Path) -> None:
    assert verify(path, RemoteFile("file", len(CONTENT))) == ""
    assert "instead of 5" in verify(path, RemoteFile("file", 5))
