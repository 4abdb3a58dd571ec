"""Downloads of files whose source sends more than it lists."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from baton_engine.fetch.download import CORRUPT_TRIES, Download, RetryPolicy
from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.fetch_progress import FetchProgress
from baton_engine.fetch.folder import Partial
from baton_engine.fetch.sources.source import Listing, RemoteFile

FILE = RemoteFile("config.json", 2, "")


class _EndlessSource:
    """Sends bytes until a write fails."""

    def __init__(self) -> None:
        self.num_writes = 0

    def listing(self) -> Listing:
        return Listing("revision", (FILE,))

    def read(self, file: RemoteFile, revision: str, target: io.BufferedIOBase, offset: int) -> None:
        while self.num_writes < 1000:
            self.num_writes += 1
            target.write(b"x" * 2**16)


def test_a_file_larger_than_listed_is_read_no_further(tmp_path: Path) -> None:
    source, partial = _EndlessSource(), Partial(tmp_path / "model", "hf://a/b", "revision")
    download = Download(source, "revision", partial, RetryPolicy(), FetchProgress())
    with pytest.raises(FetchError, match="has 65536 bytes instead of 2") as caught:
        download.run([FILE])
    assert caught.value.reason == "ModelCorrupt"
    assert source.num_writes == 2 * CORRUPT_TRIES
