"""Control planes for the end-to-end tests: every test that asks for `control_plane` runs on the embedded one and on a real one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_local.control_plane import ControlPlane
from baton_local.control_plane.embedded import EmbeddedControlPlane
from baton_local.control_plane.real import RealControlPlane, find_assets, missing_assets

REQUIRE_REAL = "BATON_REQUIRE_REAL_CONTROL_PLANE"


@pytest.fixture(scope="session", params=["embedded", "real"])
def control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A started control plane; `control_plane.kubeconfig` is the way in. Started once per session."""
    state_dir: Path = tmp_path_factory.mktemp(f"control-plane-{request.param}")
    plane: ControlPlane
    if request.param == "embedded":
        plane = EmbeddedControlPlane(state_dir)
    else:
        assets = find_assets()
        if assets is None:
            if os.environ.get(REQUIRE_REAL) == "1":
                pytest.fail(f"{REQUIRE_REAL}=1, but {missing_assets()}")
            pytest.skip(f"no real control plane: {missing_assets()}")
        plane = RealControlPlane(assets, state_dir)
    plane.start(timeout_s=120)
    yield plane
    plane.stop()
