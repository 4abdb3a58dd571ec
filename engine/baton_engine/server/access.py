"""Access control: admits clients with the service key, and counts and logs refused clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import Counter

from baton_engine.models.errors import ConfigurationError
from baton_protocol.service_key import AdminRequest, ServiceKey, ServiceKeyError

logger = logging.getLogger(__name__)

#: Minimum time between two log lines about one port, so that clients cannot flood the log.
LOG_INTERVAL_S = 60.0

#: A port of the engine. "engine" is the port of the ROUTER.
Door = Literal["engine", "http"]


class Access:
    """Checks whether clients have the service key, and counts refusals. Thread-safe."""

    def __init__(
        self, key: ServiceKey | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create an object that checks for `key`. If `key` is None, all clients are admitted."""
        self.key = key
        self.refusals = Counter(
            "baton:access_refused",
            "Connections and requests that were refused because they lack the service's key.",
            ["door"],
            registry=None,
        )
        for door in ("engine", "http"):  # Prometheus rates need a sample of 0
            self.refusals.labels(door)
        self._clock = clock
        self._lock = threading.Lock()
        self._not_logged: dict[Door, int] = {"engine": 0, "http": 0}
        self._logged_at: dict[Door, float] = {}

    @classmethod
    def load(cls, service_key_file: str) -> Access:
        """Return an object that checks for the key in a file.

        If the path is empty, all clients are admitted.

        Raises:
            ConfigurationError: the key cannot be read.
        """
        try:
            return cls(ServiceKey.load(service_key_file))
        except ServiceKeyError as error:
            raise ConfigurationError("ServiceKeyInvalid", str(error)) from None

    def admits(self, authorization: str | None, request: AdminRequest) -> bool:
        """Return whether the `authorization` header permits the request. A refusal is counted."""
        if self.key is None or self.key.admits(authorization, request):
            return True
        self.refused("http")
        return False

    def refused(self, door: Door, count: int = 1) -> None:
        """Add `count` refused connections or requests to the counter of a port (`door`).

        The refusals of a port are logged at most once in LOG_INTERVAL_S.
        """
        self.refusals.labels(door).inc(count)
        now = self._clock()
        with self._lock:
            self._not_logged[door] += count
            if now - self._logged_at.get(door, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
                return
            self._logged_at[door], count, self._not_logged[door] = now, self._not_logged[door], 0
        logger.warning(
            "%s port: refused %d connections or requests without the service key; "
            "gateways, ranks and HTTP clients need the key in this engine's --service-key-file",
            door,
            count,
        )
