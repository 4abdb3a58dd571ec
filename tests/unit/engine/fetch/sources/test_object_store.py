"""Fetching s3:// models from an object store on loopback: files, errors, retries and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_engine.fetch.folder import MARKER
from support.fetch import fetcher
from support.fetch.fake_store import ACCESS_KEY, FakeStore, fake_store

URI = "s3://models/team/small"
PREFIX = "team/small/"
LARGE = f"{PREFIX}model-00001-of-00002.safetensors"


@pytest.fixture
def store() -> Iterator[FakeStore]:
    objects = {f"{PREFIX}{name}": content for name, content in fetcher.MODEL_FILES.items()}
    objects |= {
        LARGE: fetcher.LARGE_WEIGHTS,
        f"{PREFIX}deeper/x.safetensors": b"x",
        "team/small-but-other/config.json": b"{}",
    }
    with fake_store("models", objects) as store:
        yield store


def fetch(store: FakeStore, target: Path, uri: str = URI, key: str = ACCESS_KEY) -> tuple[int, str]:
    env = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return fetcher.run(uri, target, "--give-up-after", "30", AWS_ENDPOINT_URL=store.url, **env)


def revision(target: Path) -> str:
    return str(json.loads((target / MARKER).read_text())["revision"])


def assert_complete(store: FakeStore, target: Path) -> None:
    there = {path.name: path.read_bytes() for path in target.iterdir() if path.name != MARKER}
    assert there == {name: store.objects[f"{PREFIX}{name}"] for name in fetcher.TAKEN}
    assert fetcher.left_behind(target) == set()


def test_objects_directly_below_the_prefix_are_fetched_and_define_the_revision(
    store: FakeStore, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        code, stderr = fetch(store, tmp_path / name / "model")
        assert code == 0, stderr
        assert_complete(store, tmp_path / name / "model")
        store.objects[f"{PREFIX}config.json"] = b'{"changed": true}'
    assert revision(tmp_path / "one" / "model") != revision(tmp_path / "two" / "model")


def test_downloads_are_retried_and_resumed_after_503_and_broken_connections(
    store: FakeStore, tmp_path: Path
) -> None:
    store.unavailable, store.truncate = 2, 3
    code, stderr = fetch(store, tmp_path / "model")
    assert code == 0, stderr
    assert_complete(store, tmp_path / "model")
    assert max(first for key, first in store.offsets if key == LARGE) > 0, store.offsets


def test_an_object_replaced_during_the_download_is_a_fatal_error(
    store: FakeStore, tmp_path: Path
) -> None:
    store.replace_on_read = LARGE
    code, stderr = fetch(store, tmp_path / "model")
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (1, "FATAL ModelChanged"), stderr
    assert not (tmp_path / "model").exists()
    code, stderr = fetch(store, tmp_path / "model")
    assert code == 0, stderr
    assert_complete(store, tmp_path / "model")


@pytest.mark.parametrize(
    ("uri", "key", "reason"),
    [
        ("s3://models/team/none", ACCESS_KEY, "ModelMissing"),
        ("s3://no-such-bucket/x", ACCESS_KEY, "ModelMissing"),
        (URI, "AKIDUNKNOWN", "ModelAccessDenied"),
    ],
)
def test_a_missing_model_or_wrong_credentials_are_a_fatal_error(
    store: FakeStore, tmp_path: Path, uri: str, key: str, reason: str
) -> None:
    code, stderr = fetch(store, tmp_path / "model", uri, key)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (78, f"FATAL {reason}"), stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "endpoint",
    [
        "garbage",
        "",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:1\n",
        "ftp://x",
    ],
)
def test_an_invalid_endpoint_is_refused_with_its_value(tmp_path: Path, endpoint: str) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": endpoint,
    }
    code, stderr = fetcher.run(URI, tmp_path / "model", **env)
    message = (
        f"AWS_ENDPOINT_URL must be http://HOST[:PORT] or https://HOST[:PORT], got {endpoint!r}"
    )
    assert (code, fetcher.last_line(stderr)) == (78, f"FATAL ModelSourceInvalid: {message}"), stderr
    assert "panicked" not in stderr


@pytest.mark.parametrize(
    ("uri", "env"),
    [
        (URI, {"AWS_SKIP_SIGNATURE": "maybe"}),
        (URI, {"AWS_ENDPOINT": "garbage", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}),
        ("gs://models/team", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}),
    ],
)
def test_settings_that_the_library_refuses_are_a_fatal_error(
    tmp_path: Path, uri: str, env: dict[str, str]
) -> None:
    code, stderr = fetcher.run(uri, tmp_path / "model", "--give-up-after", "60", **env)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (
        78,
        "FATAL ModelSourceInvalid",
    ), stderr
    assert "Traceback" not in stderr
