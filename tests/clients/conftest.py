"""A gateway for the programs of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.clients.client_rig import ClientRig, are_installed, client_rig


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[ClientRig]:
    if not are_installed():
        pytest.fail("the clients are not installed: run make clients")
    async with client_rig(tmp_path) as rig:
        yield rig
