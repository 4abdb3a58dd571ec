"""A context of ZeroMQ."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from support.protected_sockets import DEADLINE_MS


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A context that must end within the deadline, with all sockets of ZAP."""
    context = zmq.Context()
    context.linger = 0  # default of its sockets
    yield context
    ending = threading.Thread(target=context.destroy, daemon=True)
    ending.start()
    ending.join(DEADLINE_MS / 1000)
    assert not ending.is_alive(), "the context does not end: some socket in it is open"
