"""Control planes for the end-to-end tests.

A test with the fixture `control_plane` runs on the embedded and on a real control plane.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest

from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane, find_assets, missing_assets

ControlPlane = EmbeddedControlPlane | RealControlPlane
REQUIRE_REAL = "BATON_REQUIRE_REAL_CONTROL_PLANE"


@pytest.fixture(scope="session")
def embedded_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with started(EmbeddedControlPlane(tmp_path_factory.mktemp("control-plane-embedded"))) as plane:
        yield plane


@pytest.fixture(scope="session")
def real_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assets = find_assets()
    if assets is None:
        if os.environ.get(REQUIRE_REAL) == "1":
            pytest.fail(f"{REQUIRE_REAL}=1, but {missing_assets()}")
        pytest.skip(f"no real control plane: {missing_assets()}")
    with started(RealControlPlane(assets, tmp_path_factory.mktemp("control-plane-real"))) as plane:
        yield plane


@contextlib.contextmanager
def started(plane: ControlPlane) -> Iterator[ControlPlane]:
    plane.start(timeout_s=120)
    try:
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session", params=["embedded", "real"])
def control_plane(request: pytest.FixtureRequest) -> ControlPlane:
    """A control plane, started once per session. Connect with `control_plane.kubeconfig`."""
    plane: ControlPlane = request.getfixturevalue(f"{request.param}_plane")
    return plane
