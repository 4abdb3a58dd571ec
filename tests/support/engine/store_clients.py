"""Raw connections to a store.

For the tests of the store.
"""

from __future__ import annotations

import contextlib
import socket
import time

from baton_engine.distributed.store.store_server import StoreServer

AT_ONCE_S = 10.0


def connection_to(server: StoreServer) -> socket.socket:
    connection = socket.create_connection(server.address, AT_ONCE_S)
    connection.settimeout(AT_ONCE_S)
    return connection


def read_until_closed(connection: socket.socket) -> int:
    """Read until the other side closes the connection, at most AT_ONCE_S; return the bytes."""
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            total += len(data)
    return total


def deadline() -> float:
    return time.monotonic() + AT_ONCE_S
