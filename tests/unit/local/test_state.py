"""The state folder of the `baton` command."""

from __future__ import annotations

import pytest

from baton_local.state import ClusterInfo, StateDir


def test_the_state_folder_is_absolute_its_owners_and_needs_no_home(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", "state")
    monkeypatch.setattr(
        "pathlib.Path.home", lambda: pytest.fail("no HOME is needed where BATON_HOME is set")
    )
    state = StateDir()
    state.acquire()
    assert state.root == tmp_path / "state"
    assert state.root.stat().st_mode & 0o077 == 0, "pods' tokens lie in it"


def test_what_a_killed_supervisor_wrote_is_not_its_successors(tmp_path) -> None:
    state = StateDir(tmp_path)
    state.acquire()
    state.write_info(ClusterInfo(1, "/k", "embedded", "default", "demo", "/f"))
    assert state.read_info() is None
