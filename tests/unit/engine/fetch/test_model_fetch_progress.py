"""What the fetcher says of itself while it works, and while it does not get on."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from baton_engine.fetch.progress import MAX_ERROR_CHARS, Progress
from baton_protocol.progress import LoadProgress
from pocketkube.ports import free_ports
from support.fetch import fetcher
from support.fetch.fake_hub import fake_hub
from support.waiting import eventually

URI = "hf://org/model"


def test_an_error_is_told_until_more_of_the_model_is_there() -> None:
    done = 4
    progress = Progress()
    progress.set_step("fetching", lambda: LoadProgress(done, 10))
    assert progress.health().error == ""
    progress.fail("x.safetensors:\n  connection reset")
    assert progress.health().error == "x.safetensors: connection reset"
    assert progress.health().error, "to ask does not change it"
    done = 5
    assert progress.health().error == ""


def test_an_error_is_told_through_attempts_at_the_same_and_not_of_what_comes_next() -> None:
    progress = Progress()
    progress.set_step("listing the files")
    progress.fail("connection refused")
    progress.set_step("listing the files")
    assert progress.health().error == "connection refused"
    progress.set_step("fetching")
    assert progress.health().error == ""


def test_a_long_error_is_cut() -> None:
    progress = Progress()
    progress.fail("x" * 2**20)
    assert len(progress.health().error) == MAX_ERROR_CHARS


def health(port: int) -> dict[str, Any]:
    """Empty while nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return dict(json.load(response))
    except OSError:
        return {}


def test_a_hub_that_refuses_connections_is_told_over_http(tmp_path: Path) -> None:
    port, nobody = free_ports(2)
    flags = ("--http-port", str(port))
    hub = f"http://127.0.0.1:{nobody}"
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


def test_a_file_that_does_not_come_is_told_over_http(tmp_path: Path) -> None:
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
            told = health(port)
            assert told["progress"]["done_bytes"] < told["progress"]["total_bytes"]
        finally:
            process.kill()
            fetcher.finish(process)
