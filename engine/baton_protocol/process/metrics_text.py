"""The Prometheus metrics of a process as text, for a port that clients may flood with requests."""

from __future__ import annotations

import threading
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest

#: Limit on computations of the text per second. One computation holds the GIL for 2 to 4 ms.
MAX_PER_S = 30


class MetricsText:
    """Computes the text of a registry's metrics, on average at most MAX_PER_S times per second.

    Thread-safe. The limit allows a burst of MAX_PER_S computations. A call of `get` above the limit
    returns the text of the last computation, which is at most 1 / MAX_PER_S seconds old.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._text = b""
        #: Tokens in the bucket at time `_counted_at`. A computation takes one token.
        self._num_allowed = float(MAX_PER_S)
        self._counted_at = monotonic()

    def get(self) -> bytes:
        """Return the metrics in the text exposition format."""
        with self._lock:
            now = monotonic()
            refill = (now - self._counted_at) * MAX_PER_S
            self._num_allowed = min(MAX_PER_S, self._num_allowed + refill)
            self._counted_at = now
            if self._num_allowed >= 1:
                self._num_allowed -= 1
                self._text = generate_latest(self._registry)
            return self._text
