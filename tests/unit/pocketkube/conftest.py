"""An embedded control plane, started once per module, and a running container."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.process import ContainerProcess, ContainerReaper
from pocketkube.control_plane.embedded import EmbeddedControlPlane


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedControlPlane]:
    plane = EmbeddedControlPlane(tmp_path_factory.mktemp("plane"), event_window=20)
    plane.start(90)
    yield plane
    plane.stop()


@pytest.fixture
async def container(tmp_path: Path) -> AsyncIterator[tuple[ContainerProcess, ContainerLog]]:
    reaper = ContainerReaper(tmp_path / "state")
    await reaper.start()
    log = ContainerLog(tmp_path / "log" / "0.log")
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {**os.environ, "COLOUR": "green"}
    process = ContainerProcess.start(["sleep", "600"], environment, folder, reaper, "some-id", log)
    yield process, log
    await process.finish()
    await reaper.stop()
