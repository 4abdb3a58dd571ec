"""The folders of a model on disk: reuse of partial folders, markers, and planted state."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.folder import INCOMPLETE, MARKER, Marker, Partial, read_complete
from baton_engine.fetch.lock import boot_id
from baton_engine.fetch.sources.source import RemoteFile

URI = "hf://org/model"


FILE = RemoteFile("config.json", 2, "")
WEIGHTS = RemoteFile("x.safetensors", 4, "")


def partial_fetch(target: Path, revision: str = "r1") -> Partial:
    """Return a partial folder with one verified file and half of another."""
    partial = Partial(target, URI, revision)
    partial.incomplete(FILE).write_bytes(b"{}")
    partial.accept(FILE)
    partial.save()
    partial.incomplete(WEIGHTS).write_bytes(b"ab")
    return partial


def partials(target: Path) -> set[Path]:
    return set(target.parent.glob(f"{target.name}.partial-*"))


def test_files_of_a_dead_fetcher_are_reused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    partial_fetch(target).close()  # as the kernel does when the process dies
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert mine.has(FILE)
    assert mine.incomplete(WEIGHTS).read_bytes() == b"ab"
    assert partials(target) == {mine.path}
    mine.close()


def test_folders_that_a_dead_fetcher_was_removing_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    half_removed = target.with_name(f"{target.name}.discarded-0123456789ab")
    half_removed.mkdir()
    (half_removed / "model.safetensors").write_bytes(b"many bytes")
    others = target.with_name("model-b.discarded-0123456789ab")
    others.mkdir()
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert not half_removed.exists()
    assert others.exists()
    mine.close()


def test_files_of_a_running_fetcher_are_not_reused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    living, mine = partial_fetch(target), Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert not mine.has(FILE)
    assert living.has(FILE)
    living.close()
    mine.close()


def test_only_verified_files_of_a_fetcher_on_another_machine_are_reused(tmp_path: Path) -> None:
    """It may still be running and writing to the incomplete files."""
    target = tmp_path / "model"
    other = partial_fetch(target)
    other._state.machine = "another"
    other.save()
    other.close()
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert mine.has(FILE)
    assert not mine.incomplete(WEIGHTS).exists()
    mine.close()


def test_files_of_another_revision_are_not_reused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    partial_fetch(target, "r0").close()
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert not mine.has(FILE)
    assert not list(mine.path.glob(f"*{INCOMPLETE}"))
    assert partials(target) == {mine.path}, "the partial folder of another revision was kept"
    mine.close()


def plant_partial(target: Path, verified: dict[str, RemoteFile]) -> Path:
    """Write a partial folder as a hostile client of the shared cache would, with this state."""
    folder = target.with_name(f"{target.name}.partial-planted")
    folder.mkdir()
    (folder / ".baton-partial.lock").touch()
    state = {"uri": URI, "revision": "r1", "machine": boot_id(), "verified": verified}
    (folder / ".baton-partial.json").write_bytes(msgspec.json.encode(state))
    return folder


@pytest.mark.parametrize("name", ["../victim/x", "link/x"])
def test_a_planted_state_neither_moves_files_of_others_nor_ends_the_fetch(
    tmp_path: Path, name: str
) -> None:
    target, victim = tmp_path / "model", tmp_path / "victim" / "x"
    victim.parent.mkdir()
    victim.write_bytes(b"{}")
    folder = plant_partial(target, {name: RemoteFile(name, 2), "config.json": RemoteFile(name, 2)})
    (folder / "link").symlink_to(victim.parent)
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert victim.read_bytes() == b"{}"
    assert partials(target) == {mine.path}
    mine.close()


@pytest.mark.parametrize("content", [b"[]", b"{}"])
def test_a_planted_file_is_reused_only_with_the_listed_digest(
    tmp_path: Path, content: bytes
) -> None:
    target = tmp_path / "model"
    listed = RemoteFile("config.json", 2, f"sha256:{hashlib.sha256(b'{}').hexdigest()}")
    (plant_partial(target, {"config.json": listed}) / "config.json").write_bytes(content)
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([listed])
    assert mine.has(listed) == (content == b"{}")
    assert (mine.path / "config.json").exists() == mine.has(listed)
    mine.close()


def test_a_pipe_in_place_of_the_state_does_not_block_the_fetch(tmp_path: Path) -> None:
    target = tmp_path / "model"
    folder = plant_partial(target, {})
    (folder / ".baton-partial.json").unlink()
    os.mkfifo(folder / ".baton-partial.json")
    mine = Partial(target, URI, "r1")
    mine.reuse_leftovers([FILE, WEIGHTS])
    assert partials(target) == {mine.path}
    mine.close()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_a_marker_with_names_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / MARKER).write_bytes(msgspec.json.encode(Marker(URI, "r1", "all", {name: 1})))
    with pytest.raises(FetchError, match="may lead out of the model's folder"):
        read_complete(target, URI, "all")


def test_a_pipe_in_place_of_the_marker_does_not_block_the_fetch(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    os.mkfifo(target / MARKER)
    with pytest.raises(FetchError, match="unreadable marker"):
        read_complete(target, URI, "all")


def test_two_fetchers_that_finish_together_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    first, second = partial_fetch(target), partial_fetch(target)
    assert first.commit("all", [FILE]) == second.commit("all", [FILE])
    assert partials(target) == set()
    assert (target / "config.json").read_bytes() == b"{}"
