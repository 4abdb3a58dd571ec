"""The queue of requests that wait while their service is scaled to zero.

Requests also wait here for the first decode engine of a new gateway, because the engine's limits
are not known before. Later requests of a service that is never scaled to zero do not wait here, but
in `routing.placer`.

The gauge `baton:requests_held` is the queue's length. While the length is above 0, the autoscaler
starts a decode engine. If the queue is full or the wait is too long, a request gets 503 with
Retry-After. If the service is scaled to zero by hand, a request gets 503 at once, because no
engine would start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton_gateway.errors import (
    NO_ENGINE_RETRY_AFTER_S,
    SCALED_TO_ZERO_RETRY_AFTER_S,
    APIError,
)
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool

#: Interval between keep-alive comments in the stream of a waiting request. Proxies close
#: connections that are silent for a minute.
KEEP_ALIVE_S = 10.0


class ScaleFromZeroQueue:
    """Holds requests until a decode engine is available.

    Args:
        hold_s: longest time in seconds that a request waits; 0: the queue is not enabled.
        queue_wait_s: longest wait in seconds for the gateway's first decode engine. Applies only
            if `hold_s` is 0.
        limit: maximum number of requests that wait at the same time.
    """

    def __init__(
        self,
        pool: EnginePool,
        metrics: GatewayMetrics,
        *,
        hold_s: float,
        queue_wait_s: float,
        limit: int,
    ) -> None:
        self._pool = pool
        self._hold_s = hold_s
        self._queue_wait_s = queue_wait_s
        self._limit = limit
        self._held: set[asyncio.Timeout] = set()
        metrics.held.set_function(lambda: len(self._held))

    @property
    def is_enabled(self) -> bool:
        """Whether requests wait whenever no decode engine is available.

        If False, requests wait only until the gateway has had its first decode engine.
        """
        return self._hold_s > 0

    async def wait(self, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait until a decode engine is available.

        If the service is scaled to zero by hand, the request is refused at once. Otherwise, there
        is no wait if the queue is not enabled and the gateway has had a decode engine before.

        Args:
            keep_alive: called every KEEP_ALIVE_S during the wait. None: not called.

        Raises:
            APIError: 503, because no engine started in time, the queue is full, or the service is
                scaled to zero by hand.
        """
        if self._pool.available("decode"):
            return
        if self._pool.is_scaled_to_zero:
            raise _refusal(
                "The service is scaled to zero, and serves no request until it is scaled up.",
                SCALED_TO_ZERO_RETRY_AFTER_S,
            )
        if not self.is_enabled and self._pool.has_seen_decode:
            return
        if len(self._held) >= self._limit:
            raise _refusal(
                f"{len(self._held)} requests already wait for an engine to start; retry later."
            )
        timeout = asyncio.timeout(self._hold_s if self.is_enabled else self._queue_wait_s)
        self._held.add(timeout)
        try:
            async with timeout:
                while not await self._pool.wait_for(
                    lambda: self._pool.available("decode") or None, KEEP_ALIVE_S
                ):
                    if keep_alive is not None:
                        await keep_alive()
        except TimeoutError:
            raise _refusal("No engine started in time; retry later.") from None
        finally:
            self._held.discard(timeout)

    def fail_all(self) -> None:
        """End all waits now, each with APIError (503), because the gateway shuts down."""
        now = asyncio.get_running_loop().time()
        for timeout in self._held:
            timeout.reschedule(now)


def _refusal(message: str, retry_after_s: int = NO_ENGINE_RETRY_AFTER_S) -> APIError:
    return APIError(503, message, code="no_ready_engine", retry_after_s=retry_after_s)
