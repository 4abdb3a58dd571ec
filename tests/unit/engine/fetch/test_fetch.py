"""Downloads that end with an error: a full disk, and an invalid listing."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_engine.fetch.download import RetryPolicy
from baton_engine.fetch.fetch import FetchRequest, fetch
from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.fetch_progress import FetchProgress
from baton_engine.fetch.sources.source import Listing, RemoteFile
from support.fetch import fetcher
from support.fetch.fake_hub import fake_hub

URI = "hf://org/model"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_fails_before_the_download(small_disk: Path) -> None:
    with fake_hub({**fetcher.MODEL_FILES, "big.safetensors": bytes(2**20)}) as hub:
        code, stderr = fetcher.run(
            URI, small_disk / "model", HF_ENDPOINT=hub.url, HF_HOME=str(small_disk.parent / "hf")
        )
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL NoSpace"), stderr
    assert hub.downloads.total() == 0


def test_a_disk_that_fills_up_during_the_download_ends_the_fetch(small_disk: Path) -> None:
    with fake_hub(dict(fetcher.MODEL_FILES)) as hub:
        hub.hold_after = 1000
        process = fetcher.start(
            URI, small_disk / "model", HF_ENDPOINT=hub.url, HF_HOME=str(small_disk.parent / "hf")
        )
        assert hub.held.wait(60), "the fetcher requested no weights"
        free = os.statvfs(small_disk)
        # The fetcher also writes, so the disk may be full earlier.
        with contextlib.suppress(OSError):
            (small_disk / "of-another").write_bytes(bytes(free.f_bavail * free.f_frsize))
        hub.release.set()
        code, stderr = fetcher.finish(process)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL NoSpace"), stderr
    assert not (small_disk / "model").exists()


def test_a_listing_with_a_negative_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def listing(self) -> Listing:
            return Listing("r1", (RemoteFile("config.json", -1), RemoteFile("a.safetensors", 1)))

    monkeypatch.setattr("baton_engine.fetch.fetch.create_source", lambda _: Hostile())
    with pytest.raises(FetchError, match=r"config\.json is listed with -1 bytes"):
        fetch(FetchRequest(URI, tmp_path / "model"), FetchProgress(), RetryPolicy())
