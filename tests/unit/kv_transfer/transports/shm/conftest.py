"""Two shared-memory transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.kv_transfer.shm_rig import SHMTransportHere


@pytest.fixture
def transports() -> Iterator[Callable[[str], SHMTransportHere]]:
    made: list[SHMTransportHere] = []

    def make(name: str) -> SHMTransportHere:
        made.append(SHMTransportHere(name))
        return made[-1]

    yield make
    for transport in made:
        transport.thread.close()
