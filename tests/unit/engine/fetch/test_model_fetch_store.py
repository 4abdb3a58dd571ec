"""s3:// against a store on loopback: the same promises as for a hub, but that an object is known by its ETag alone."""

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


def test_what_lies_right_below_the_prefix_is_fetched_and_its_revision_follows_the_content(
    store: FakeStore, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        code, stderr = fetch(store, tmp_path / name / "model")
        assert code == 0, stderr
        assert_complete(store, tmp_path / name / "model")
        store.objects[f"{PREFIX}config.json"] = b'{"changed": true}'
    assert revision(tmp_path / "one" / "model") != revision(tmp_path / "two" / "model")


def test_busy_stores_and_broken_connections_are_tried_again_and_resumed(
    store: FakeStore, tmp_path: Path
) -> None:
    store.unavailable, store.truncate = 2, 3
    code, stderr = fetch(store, tmp_path / "model")
    assert code == 0, stderr
    assert_complete(store, tmp_path / "model")
    assert max(first for key, first in store.offsets if key == LARGE) > 0, store.offsets


def test_an_object_that_is_replaced_meanwhile_is_not_mixed_with_its_successor(
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
        (URI, "AKIDSTRANGER", "ModelAccessDenied"),
    ],
)
def test_what_cannot_be_had_ends_at_once(
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
def test_an_endpoint_that_is_none_is_named(tmp_path: Path, endpoint: str) -> None:
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
def test_settings_that_the_library_cannot_take_end_at_once(
    tmp_path: Path, uri: str, env: dict[str, str]
) -> None:
    code, stderr = fetcher.run(uri, tmp_path / "model", "--give-up-after", "60", **env)
    assert (code, fetcher.last_line(stderr).partition(":")[0]) == (
        78,
        "FATAL ModelSourceInvalid",
    ), stderr
    assert "Traceback" not in stderr
