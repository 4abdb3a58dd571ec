"""A cache that another pod has prepared reaches no file outside the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.folder import MARKER, Partial, read_complete
from baton_engine.fetch.sources.source import RemoteFile
from support.hostile.attack import content, fifo, link_to, nested, sparse

URI = "hf://org/model"
SECRET = b"outside of the model's folder"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(fifo, id="fifo"),
        pytest.param(link_to("/dev/zero"), id="device"),
        pytest.param(link_to("../secret"), id="link"),
        pytest.param(sparse, id="large"),
        pytest.param(nested(), id="deep"),
        pytest.param(content(b"\xff"), id="not-utf8"),
        pytest.param(content("[]"), id="list"),
    ],
)
def test_a_hostile_marker_is_refused(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    target = tmp_path / "model"
    target.mkdir()
    damage(target / MARKER)
    with pytest.raises(FetchError) as caught:
        read_complete(target, URI, "all")
    assert caught.value.reason == "ModelCacheInvalid"
    assert str(target) in caught.value.message


def leftover(target: Path, verified: dict[str, RemoteFile]) -> Path:
    """Create the partial folder of a dead fetcher, with this state file."""
    partial = Partial(target, URI, "r1")
    partial._state.verified = verified
    partial.save()
    partial.close()
    return partial.path


@pytest.mark.parametrize("name", ["../secret", "../../{}/secret", "sub/../../secret"])
def test_names_in_the_state_of_another_fetcher_reach_no_file_outside(
    tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    name = name.format(tmp_path.name)
    other = leftover(tmp_path / "model", {name: RemoteFile(name, len(SECRET))})
    (other / "sub").mkdir()
    mine = Partial(tmp_path / "model", URI, "r1")
    mine.reuse_leftovers([RemoteFile("config.json", len(SECRET))])
    assert secret.read_bytes() == SECRET
    assert sorted(os.listdir(tmp_path)) == sorted([mine.path.name, "secret"])


@pytest.mark.parametrize("damage", [fifo, sparse, link_to("/dev/zero"), nested()])
def test_a_hostile_state_file_of_another_fetcher_is_ignored(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    other = leftover(tmp_path / "model", {})
    damage(other / ".baton-partial.json")
    mine = Partial(tmp_path / "model", URI, "r1")
    mine.reuse_leftovers([])
    assert not other.exists()


def test_a_link_in_the_folder_of_another_fetcher_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    config = RemoteFile("config.json", len(SECRET))
    other = leftover(tmp_path / "model", {"config.json": config})
    (other / "config.json").symlink_to("../secret")
    mine = Partial(tmp_path / "model", URI, "r1")
    mine.reuse_leftovers([config])
    assert not mine.has(config)
    assert (tmp_path / "secret").read_bytes() == SECRET


def test_a_link_in_place_of_a_folder_of_the_model_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    mine = Partial(tmp_path / "model", URI, "r1")
    (mine.path / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FetchError, match="1_Pooling is a link"):
        mine.incomplete(RemoteFile("1_Pooling/config.json", 9))
