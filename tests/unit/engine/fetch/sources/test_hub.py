"""Fetching hf:// models from a hub on loopback: files, errors, retries and restarts."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton_engine.fetch.folder import INCOMPLETE, MARKER
from support.fetch import fetcher
from support.fetch.fake_hub import TOKEN, FakeHub, fake_hub
from support.waiting import eventually

URI = "hf://org/model"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HELD_BYTES = 12 * 2**20
#: The part of HELD_BYTES that huggingface_hub writes, in whole chunks.
WRITTEN_BYTES = 10 * 2**20


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(dict(fetcher.MODEL_FILES)) as hub:
        yield hub


@pytest.fixture
def large_hub(hub: FakeHub) -> FakeHub:
    """Return the hub with weights of several chunks."""
    hub.files |= {FIRST: fetcher.LARGE_WEIGHTS, SECOND: fetcher.LARGE_WEIGHTS[::-1]}
    return hub


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model"


def fetch(hub: FakeHub, target: Path, *flags: str, uri: str = URI, **env: str) -> tuple[int, str]:
    return fetcher.run(uri, target, *flags, HF_ENDPOINT=hub.url, **env)


def begin(hub: FakeHub, target: Path, *flags: str) -> subprocess.Popen[str]:
    return fetcher.start(URI, target, *flags, HF_ENDPOINT=hub.url)


def assert_complete(hub: FakeHub, target: Path) -> None:
    there = {path.name: path.read_bytes() for path in target.iterdir()}
    marker = json.loads(there.pop(MARKER))
    assert there == {name: hub.files[name] for name in fetcher.TAKEN}
    assert (marker["uri"], marker["revision"]) == (URI, hub.commit)
    assert fetcher.left_behind(target) == set()


def test_weights_json_and_tokenizer_are_fetched_but_no_code_and_no_pickles(
    hub: FakeHub, target: Path
) -> None:
    log = target.parent / "termination-log"
    code, stderr = fetch(hub, target, "--termination-log", str(log))
    assert code == 0, stderr
    log_content = json.loads(log.read_text())
    log.unlink()
    assert_complete(hub, target)
    assert log_content == {"revision": hub.commit}


def test_the_pooling_of_an_embedding_model_is_fetched(hub: FakeHub, target: Path) -> None:
    pooling = {"1_Pooling/config.json": b'{"pooling_mode_cls_token": true}'}
    hub.files |= {**pooling, "2_Dense/config.json": b"{}", "1_Pooling/code.py": b""}
    for flags, there in ((["--only", "tokenizer"], {}), ([], pooling)):
        folder = target.with_name("-".join(["model", *flags[1:]]))
        code, stderr = fetch(hub, folder, *flags)
        assert code == 0, stderr
        below = set(folder.glob("*/*"))
        assert {str(path.relative_to(folder)): path.read_bytes() for path in below} == there
    code, stderr = fetch(hub, target)  # complete, so it is not downloaded again
    assert code == 0, stderr


def test_a_gateway_fetches_no_weights(hub: FakeHub, target: Path) -> None:
    code, stderr = fetch(hub, target, "--only", "tokenizer")
    assert code == 0, stderr
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        MARKER,
    }


def test_a_complete_folder_is_used_without_a_download(hub: FakeHub, target: Path) -> None:
    assert fetch(hub, target)[0] == 0
    hub.private = True
    code, stderr = fetch(hub, target)
    assert code == 0, stderr
    assert hub.downloads.total() == len(fetcher.TAKEN)


def test_a_folder_with_a_damaged_file_is_fetched_again(hub: FakeHub, target: Path) -> None:
    assert fetch(hub, target)[0] == 0
    (target / FIRST).write_bytes(b"short")
    assert fetch(hub, target)[0] == 0
    assert_complete(hub, target)


def test_a_branch_is_resolved_to_its_commit(hub: FakeHub, target: Path) -> None:
    hub.branch = "v1.0"
    code, stderr = fetch(hub, target, uri=f"{URI}@v1.0")
    assert code == 0, stderr
    assert json.loads((target / MARKER).read_text())["revision"] == hub.commit


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("hf://org/other", "ModelMissing"),
        (f"{URI}@no-such-branch", "ModelMissing"),
        ("hf://org", "ModelUriInvalid"),
        ("ftp://host/model", "ModelUriInvalid"),
    ],
)
def test_a_missing_model_or_an_invalid_uri_is_a_fatal_error(
    hub: FakeHub, target: Path, uri: str, reason: str
) -> None:
    code, stderr = fetch(hub, target, uri=uri)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, f"FATAL {reason}"), stderr
    assert not target.exists()


def test_a_private_model_requires_its_token(hub: FakeHub, target: Path) -> None:
    hub.private = True
    for env in ({}, {"HF_TOKEN": "hf_wrong"}):
        code, stderr = fetch(hub, target, **env)
        assert code == 78
        assert fetcher.last_line(stderr).startswith("FATAL ModelAccessDenied: "), stderr
        assert "hf_wrong" not in stderr
    code, stderr = fetch(hub, target, HF_TOKEN=TOKEN)
    assert code == 0, stderr
    assert_complete(hub, target)


def test_downloads_are_retried_and_resumed_after_503_and_broken_connections(
    large_hub: FakeHub, target: Path
) -> None:
    hub = large_hub
    hub.unavailable = 2
    hub.truncate = {FIRST: 2, "config.json": 1}
    code, stderr = fetch(hub, target)
    assert code == 0, stderr
    assert_complete(hub, target)
    assert max(first for name, first in hub.ranges if name == FIRST) >= WRITTEN_BYTES, hub.ranges


def test_damaged_bytes_are_fetched_again(hub: FakeHub, target: Path) -> None:
    hub.damage = {FIRST: 1, "tokenizer.json": 2}
    code, stderr = fetch(hub, target)
    assert code == 0, stderr
    assert_complete(hub, target)


@pytest.mark.parametrize("name", [FIRST, "tokenizer.json"])
def test_a_file_that_is_always_damaged_is_a_fatal_error(
    hub: FakeHub, target: Path, name: str
) -> None:
    hub.damage = {name: 1000}
    code, stderr = fetch(hub, target)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (1, "FATAL ModelCorrupt"), stderr
    assert not target.exists()


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_file_of_another_size_than_listed_is_refused(
    hub: FakeHub, target: Path, difference: int
) -> None:
    hub.claimed_sizes = {FIRST: len(fetcher.WEIGHTS) + difference}
    code, stderr = fetch(hub, target, "--give-up-after", "1")
    assert code == 1
    assert fetcher.last_line(stderr).startswith(
        ("FATAL ModelCorrupt: ", "FATAL ModelSourceUnavailable: ")
    ), stderr
    assert not target.exists()


def test_an_unreachable_hub_is_a_fatal_error_after_the_deadline(hub: FakeHub, target: Path) -> None:
    code, stderr = fetcher.run(
        URI, target, "--give-up-after", "2", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (
        1,
        "FATAL ModelSourceUnavailable",
    ), stderr


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..\\evil.json", "a//b.json"]
)
def test_a_file_name_outside_the_folder_is_refused(hub: FakeHub, target: Path, name: str) -> None:
    hub.files[name] = b"{}"
    code, stderr = fetch(hub, target)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL ModelInvalid"), stderr
    assert hub.downloads.total() == 0


@pytest.mark.parametrize("missing", [{"config.json"}, {FIRST, SECOND}])
def test_a_repository_without_config_or_weights_is_not_fetched(
    hub: FakeHub, target: Path, missing: set[str]
) -> None:
    hub.files = {name: content for name, content in hub.files.items() if name not in missing}
    code, stderr = fetch(hub, target)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL ModelInvalid"), stderr
    assert hub.downloads.total() == 0


def test_a_folder_with_other_files_is_not_changed(hub: FakeHub, target: Path) -> None:
    target.mkdir()
    (target / "thesis.txt").write_text("the only copy")
    code, stderr = fetch(hub, target)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL ModelCacheInvalid"), (
        stderr
    )
    assert (target / "thesis.txt").read_text() == "the only copy"


def test_a_symlink_at_the_target_is_not_followed(
    hub: FakeHub, target: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    target.symlink_to(victim)
    code, stderr = fetch(hub, target)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL ModelCacheInvalid"), (
        stderr
    )
    assert victim.read_bytes() == b"precious"


def test_a_model_larger_than_the_limit_is_not_fetched(hub: FakeHub, target: Path) -> None:
    code, stderr = fetch(hub, target, "--max-bytes", str(len(fetcher.WEIGHTS)))
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, "FATAL NoSpace"), stderr
    assert hub.downloads.total() == 0


def partial_bytes(target: Path) -> int:
    num_bytes = 0
    for path in target.parent.glob(f"{target.name}.partial-*/*{INCOMPLETE}"):
        with suppress(FileNotFoundError):  # a complete file is renamed immediately
            num_bytes += path.stat().st_size
    return num_bytes


def test_the_next_fetcher_resumes_the_download_of_a_killed_one(
    large_hub: FakeHub, target: Path
) -> None:
    hub = large_hub
    hub.hold_after = HELD_BYTES
    first = begin(hub, target)
    eventually(
        lambda: partial_bytes(target) >= 2 * WRITTEN_BYTES,
        timeout_s=60,
        what="both weight files half way",
    )
    first.kill()
    fetcher.finish(first)
    assert not target.exists()
    hub.hold_after = None
    before = hub.downloads.copy()
    code, stderr = fetch(hub, target)
    assert code == 0, stderr
    assert_complete(hub, target)
    again = hub.downloads - before
    assert set(again) <= {FIRST, SECOND}, "complete files were fetched again"
    assert {start for _, start in hub.ranges[-2:]} == {WRITTEN_BYTES}, hub.ranges


def test_concurrent_fetchers_of_one_cache_download_once(large_hub: FakeHub, target: Path) -> None:
    hub = large_hub
    hub.hold_after = HELD_BYTES
    first = begin(hub, target)
    assert hub.held.wait(60), "the first fetcher never asked for weights"
    second, third = begin(hub, target), begin(hub, target)
    hub.release.set()
    for process in (first, second, third):
        code, stderr = fetcher.finish(process)
        assert code == 0, stderr
    assert_complete(hub, target)
    assert dict(hub.downloads) == dict.fromkeys(fetcher.TAKEN, 1)


def test_a_waiting_fetcher_takes_over_from_a_killed_one(large_hub: FakeHub, target: Path) -> None:
    hub = large_hub
    hub.hold_after = HELD_BYTES
    first = begin(hub, target)
    assert hub.held.wait(60), "the first fetcher never asked for weights"
    second = begin(hub, target)
    hub.hold_after = None
    first.kill()
    fetcher.finish(first)
    code, stderr = fetcher.finish(second)
    assert code == 0, stderr
    assert_complete(hub, target)


def test_progress_is_reported_over_http(large_hub: FakeHub, target: Path, free_port: int) -> None:
    hub = large_hub
    hub.hold_after = HELD_BYTES
    process = fetcher.start(
        URI, target, "--http-port", str(free_port), HF_ENDPOINT=hub.url, POD_IP="127.0.0.1"
    )
    total = sum(len(content) for name, content in hub.files.items() if name in fetcher.TAKEN)

    def is_half_fetched() -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{free_port}/health", timeout=5
            ) as response:
                health = json.load(response)
        except OSError as error:
            raise AssertionError(str(error)) from error
        assert health["reason"] == "Fetching"
        progress = health.get("progress") or {}
        assert progress.get("total_bytes") == total, health
        return 2 * WRITTEN_BYTES <= progress["done_bytes"] < total

    eventually(is_half_fetched, timeout_s=60, what="progress of both weight files")
    hub.release.set()
    code, stderr = fetcher.finish(process)
    assert code == 0, stderr
