"""One discovered engine: its connection, its state and its load."""

from __future__ import annotations

import random

from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import Ready
from baton_protocol.options.config import EngineEndpoint

#: An engine whose requests have made no progress for this long is slow: new requests go to other
#: engines.
SLOW_AFTER_S = 2.0


class PoolMember:
    """One discovered engine. `client` is set while the engine is connected and ready."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.endpoint = endpoint
        self.client: EngineClient | None = None
        self._has_left = False

    def leave(self) -> None:
        """Record that discovery no longer lists the engine."""
        self._has_left = True

    def has_left(self) -> bool:  # not a property: type checkers would narrow it in loops
        return self._has_left

    @property
    def is_available(self) -> bool:
        """Whether new requests may be sent to the engine.

        False if discovery no longer lists the engine or lists it as draining, if the engine is not
        connected, or if its heartbeats are late or show that it accepts no requests.
        """
        if self.client is None or self.has_left() or self.endpoint.draining:
            return False
        return self.client.accepts_requests

    @property
    def ready_client(self) -> EngineClient:
        """The connection to an available member."""
        assert self.client is not None
        return self.client

    @property
    def ready(self) -> Ready:
        """The last READY message of an available member, with the engine's limits and rank."""
        ready = self.ready_client.ready
        assert ready is not None  # `client` is set after READY
        return ready

    @property
    def is_slow(self) -> bool:
        """Whether the requests of the connected engine made no progress for SLOW_AFTER_S."""
        status = self.ready_client.status
        return status is not None and status.stalled_s > SLOW_AFTER_S

    def load(self) -> tuple[bool, float, float, float]:
        """Return a sort key, which is smallest for the least loaded engine.

        The key consists of: whether the engine is slow, its number of requests from all gateways,
        its KV cache usage, and a random number to break ties. Usage and the requests from other
        gateways are known from the last heartbeat.
        """
        client = self.ready_client
        usage = 0.0 if client.status is None else client.status.kv_cache_usage
        return self.is_slow, client.num_requests, usage, random.random()
