"""Who may come in at the doors of an engine: those with the service's key. The others are counted, and the log hears of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import Counter

from baton_engine.models.errors import ConfigurationError
from baton_protocol.service_key import ServiceKey, ServiceKeyError

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0

Door = Literal["engine", "http"]
"""Its ROUTER, and its HTTP."""


class Access:
    """For any thread."""

    def __init__(
        self, key: ServiceKey | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`key`: None: everyone may come in."""
        self.key = key
        self.refusals = Counter(
            "baton:access_refused",
            "Connections and requests that were refused because they lack the service's key.",
            ["door"],
            registry=None,
        )
        for door in ("engine", "http"):  # a rate needs the zero before the first
            self.refusals.labels(door)
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaid: dict[Door, int] = {"engine": 0, "http": 0}
        self._said: dict[Door, float] = {}

    @classmethod
    def load(cls, service_key_file: str) -> Access:
        """Raises ConfigurationError: the key cannot be had."""
        try:
            return cls(ServiceKey.load(service_key_file))
        except ServiceKeyError as error:
            raise ConfigurationError("ServiceKeyInvalid", str(error)) from None

    def admits(self, authorization: str | None) -> bool:
        """Whether an HTTP request with this Authorization header may change something; if not, it is counted."""
        if self.key is None or self.key.admits(authorization):
            return True
        self.refused("http")
        return False

    def refused(self, door: Door, count: int = 1) -> None:
        """So many were; the log says so once per LOG_INTERVAL_S and door, whatever they do."""
        self.refusals.labels(door).inc(count)
        now = self._clock()
        with self._lock:
            self._unsaid[door] += count
            if now - self._said.get(door, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
                return
            self._said[door], count, self._unsaid[door] = now, self._unsaid[door], 0
        logger.warning("%s port: refused %d without this service's key", door, count)
