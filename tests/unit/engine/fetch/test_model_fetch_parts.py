"""Parts of the fetcher: file selection, the lock, partial folders, and a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.folder import INCOMPLETE, MARKER, Marker, Partial, read_complete
from baton_engine.fetch.lock import FetchLock, boot_id
from baton_engine.fetch.selection import select
from baton_engine.fetch.sources.source import RemoteFile
from baton_protocol.process.health import LoadProgress
from support.fetch import fetcher
from support.fetch.fake_hub import fake_hub
from support.waiting import eventually

URI = "hf://org/model"


@given(st.lists(st.text(max_size=20)))
def test_selected_files_stay_in_the_folder_for_any_names(names: list[str]) -> None:
    try:
        taken = select([*names, "config.json", "x.safetensors"], "all")
    except FetchError:
        return
    for name in taken:
        assert os.path.normpath(name) == name
        assert "/" not in name
        assert name.endswith((".json", ".safetensors", ".jinja", ".txt", ".model"))


def test_a_lock_has_one_holder_until_it_is_released(
    tmp_path: Path,
) -> None:
    first, second = FetchLock(tmp_path / "lock"), FetchLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def write_beat(path: Path, machine: str, count: int = 7) -> None:
    path.write_bytes(msgspec.json.encode({"holder": "x", "machine": machine, "count": count}))


def test_the_lock_of_a_dead_process_on_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    write_beat(tmp_path / "lock", boot_id())
    lock = FetchLock(tmp_path / "lock", dead_after_s=3600)
    assert lock.try_acquire()
    lock.release()


def test_the_lock_of_another_machine_is_held_while_its_heartbeat_changes(tmp_path: Path) -> None:
    """Some shared file systems do not share flock between machines."""
    path = tmp_path / "lock"
    write_beat(path, "another machine")
    patient, quick = FetchLock(path, dead_after_s=3600), FetchLock(path, dead_after_s=0.2)
    assert not patient.try_acquire()
    for count in range(3):
        write_beat(path, "another machine", count)
        assert not quick.try_acquire(), "the heartbeat has just changed"
    eventually(quick.try_acquire, timeout_s=30, what="the lock of a holder without heartbeats")
    quick.release()


def test_the_lock_of_a_frozen_holder_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    frozen = FetchLock(path, beat_s=3600)
    assert frozen.try_acquire()
    other = FetchLock(path, dead_after_s=0.2)
    eventually(other.try_acquire, timeout_s=30, what="the lock of a frozen holder")
    frozen.release()
    third = FetchLock(path, dead_after_s=3600)
    assert not third.try_acquire(), "the frozen holder released the lock of another process"
    other.release()


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


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 0, ""),
        (3, 4, "75 % of 4.0 bytes"),
        (3 * 2**30, 14 * 2**30, "21 % of 14.0 GiB"),
        (2**20, 2**20, "100 % of 1.0 MiB"),
    ],
)
def test_progress_as_text(done: int, total: int, text: str) -> None:
    assert str(LoadProgress(done, total)) == text


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
