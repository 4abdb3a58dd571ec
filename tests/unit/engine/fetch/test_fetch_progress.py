"""The progress and errors that the fetcher reports over HTTP."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from baton_engine.fetch.fetch_progress import MAX_ERROR_CHARS, FetchProgress
from baton_protocol.process.health import LoadProgress
from pocketkube.ports import free_ports
from support.fetch import fetcher
from support.fetch.fake_hub import fake_hub
from support.waiting import eventually

URI = "hf://org/model"


def test_an_error_is_reported_until_more_bytes_are_fetched() -> None:
    done = 4
    progress = FetchProgress()
    progress.set_step("fetching", lambda: LoadProgress(done, 10))
    assert progress.health().error == ""
    progress.fail("x.safetensors:\n  connection reset")
    assert progress.health().error == "x.safetensors: connection reset"
    assert progress.health().error, "reading the error cleared it"
    done = 5
    assert progress.health().error == ""


def test_an_error_is_reported_until_the_next_step() -> None:
    progress = FetchProgress()
    progress.set_step("listing the files")
    progress.fail("connection refused")
    progress.set_step("listing the files")
    assert progress.health().error == "connection refused"
    progress.set_step("fetching")
    assert progress.health().error == ""


def test_a_long_error_is_truncated() -> None:
    progress = FetchProgress()
    progress.fail("x" * 2**20)
    assert len(progress.health().error) == MAX_ERROR_CHARS


def health(port: int) -> dict[str, Any]:
    """Return GET /health, or an empty dictionary if the request fails."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return dict(json.load(response))
    except OSError:
        return {}


def test_a_hub_that_refuses_connections_is_reported_over_http(tmp_path: Path) -> None:
    port, unused = free_ports(2)
    flags = ("--http-port", str(port))
    hub = f"http://127.0.0.1:{unused}"
    process = fetcher.start(URI, tmp_path / "model", *flags, HF_ENDPOINT=hub, POD_IP="127.0.0.1")
    try:
        eventually(
            lambda: "refused" in health(port).get("error", ""),
            timeout_s=60,
            what="the refused connection",
        )
        assert health(port)["reason"] == "Fetching"
        assert health(port)["message"] == f"listing the files of {URI}"
    finally:
        process.kill()
        fetcher.finish(process)


def test_a_file_that_is_too_short_is_reported_over_http(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with fake_hub(dict(fetcher.MODEL_FILES)) as hub:
        name = "model-00001-of-00002.safetensors"
        hub.claimed_sizes[name] = len(hub.files[name]) + 1
        flags = ("--http-port", str(port))
        process = fetcher.start(
            URI, tmp_path / "model", *flags, HF_ENDPOINT=hub.url, POD_IP="127.0.0.1"
        )
        try:
            eventually(
                lambda: health(port).get("error"), timeout_s=60, what="the file that is too short"
            )
            report = health(port)
            assert report["progress"]["done_bytes"] < report["progress"]["total_bytes"]
        finally:
            process.kill()
            fetcher.finish(process)
