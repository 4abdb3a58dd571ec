"""An embedded control plane, started once per module."""

from collections.abc import Iterator

import pytest

from pocketkube.control_plane.embedded import EmbeddedControlPlane


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedControlPlane]:
    plane = EmbeddedControlPlane(tmp_path_factory.mktemp("plane"), event_window=20)
    plane.start(90)
    yield plane
    plane.stop()
