"""The state folder of the `baton` command."""

from __future__ import annotations

import pytest

from baton_local.state import ClusterInfo, StateDir


def test_the_state_folder_is_absolute_private_and_independent_of_home(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", "state")
    monkeypatch.setattr(
        "pathlib.Path.home", lambda: pytest.fail("no HOME is needed where BATON_HOME is set")
    )
    state = StateDir()
    state.acquire()
    assert state.root == tmp_path / "state"
    assert state.root.stat().st_mode & 0o077 == 0, "others can read the pods' tokens"


def test_a_supervisor_ignores_the_info_of_the_previous_one(tmp_path) -> None:
    state = StateDir(tmp_path)
    state.acquire()
    state.write_info(ClusterInfo(1, "/k", "default", "demo", "/f"))
    assert state.read_info() is None
