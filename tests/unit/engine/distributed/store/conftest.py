"""A store and a client of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import Store

from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import StoreServer, open_store


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with contextlib.closing(open_store("127.0.0.1")) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Store:
    return connect_store(server.address, 60.0)
