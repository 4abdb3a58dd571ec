"""State folders that another user made, or can write to, are refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_local.state_dir import StateDir, StateDirError
from pocketkube.containers.process import ContainerReaper
from pocketkube.control_plane.real import RealControlPlane
from pocketkube.private_files import create_private_folder


def start_kubelet(folder: Path) -> None:
    asyncio.run(ContainerReaper(folder).start())


def start_real_control_plane(folder: Path) -> None:
    RealControlPlane(folder / "no-assets", folder).start()


uses = pytest.mark.parametrize(
    "use",
    [
        create_private_folder,
        lambda folder: StateDir(folder).acquire(),
        lambda folder: StateDir(folder).read_info(),
        lambda folder: StateDir(folder).stop_supervisor(timeout_s=1.0),
        start_kubelet,
        start_real_control_plane,
    ],
    ids=["folder", "baton up", "baton status", "baton down", "kubelet", "control plane"],
)


@uses
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720])
def test_a_folder_that_others_can_write_is_refused(
    use: Callable[[Path], None], mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises((PermissionError, StateDirError), match="other users may write"):
        use(folder)
    assert not list(folder.iterdir())


@uses
def test_a_folder_of_another_user_is_refused(
    use: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises((PermissionError, StateDirError), match="belongs to another user"):
        use(folder)
    assert not list(folder.iterdir())


def test_a_new_folder_is_private_and_can_be_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    for _ in range(2):
        create_private_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
