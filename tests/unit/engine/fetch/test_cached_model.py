"""Names of models: which of them are folders, and where the others are in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_engine.fetch.cached_model import CachedModel, find_cached_model
from baton_engine.fetch.fetch_errors import FetchError


def find(model: str, revision: str | None = None) -> CachedModel:
    found = find_cached_model(model, revision)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "revision", "uri", "name"),
    [
        ("Org/m-1.5", None, "hf://Org/m-1.5@main", "Org/m-1.5"),
        ("org/m", "refs/pr/1", "hf://org/m@refs/pr/1", "org/m"),
        ("org/m@v1", None, "hf://org/m@v1", "org/m"),
        ("hf://org/m", None, "hf://org/m@main", "org/m"),
        ("hf://org/m", "v1", "hf://org/m@v1", "org/m"),
        ("s3://bucket/models/m/", None, "s3://bucket/models/m", "m"),
        ("gs://bucket/m", None, "gs://bucket/m", "m"),
    ],
)
def test_a_name_is_resolved_to_a_uri_with_a_revision(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    revision: str | None,
    uri: str,
    name: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = find(model, revision)
    assert (found.uri, found.name) == (uri, name)
    assert found.folder.parent == tmp_path / "baton" / "models"


def test_each_uri_has_a_folder_of_its_own() -> None:
    models = ["a-b/c", "a/b-c", "a/b-c@v1", "s3://a/b-c", "s3://a/b/c", f"s3://a/{'b' * 400}"]
    folders = {find(model).folder for model in models}
    assert len(folders) == len(models)
    assert all(len(folder.name) < 100 for folder in folders)
    assert find("a/b-c").folder == find("hf://a/b-c@main").folder


@pytest.mark.parametrize("model", ["m", "./org/m", "/org/m", "org/m/", "org/m/x", "../m", ""])
def test_other_names_are_paths(model: str) -> None:
    assert find_cached_model(model) is None


def test_a_local_folder_is_used_before_a_model_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_cached_model("org/m") is not None
    assert find_cached_model(Path("org/m")) is None
    Path("org/m").mkdir(parents=True)
    assert find_cached_model("org/m") is None
    assert find_cached_model("hf://org/m") is not None


@pytest.mark.parametrize("model", ["/models/m", "hf://org/m@v1", "s3://bucket/m"])
def test_a_revision_without_a_meaning_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="revision"):
        find_cached_model(model, "v2")


@pytest.mark.parametrize(
    ("model", "revision"), [("https://host/m", None), ("hf://m", None), ("org/m", "../x")]
)
def test_an_invalid_uri_is_refused(model: str, revision: str | None) -> None:
    with pytest.raises(FetchError) as refused:
        find_cached_model(model, revision)
    assert refused.value.reason == "ModelUriInvalid"
