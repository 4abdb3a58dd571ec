"""The simulated group of the controller's tests."""

from __future__ import annotations

import pytest

from support.elastic.simulated_group import SimulatedGroup


@pytest.fixture
def group() -> SimulatedGroup:
    return SimulatedGroup()
