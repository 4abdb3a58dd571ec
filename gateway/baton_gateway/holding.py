"""Requests that wait while a service is scaled to zero: the gateway holds them until a decode engine has started.

That they wait is told by `baton:requests_held`, which is what the autoscaler starts an engine for. Neither their number nor their
time is without bound: who finds no place, or waited too long, is answered 503 with Retry-After.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton_gateway.errors import APIError
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.pool import EnginePool

KEEP_ALIVE_S = 10.0
"""A stream that is held gives a sign of life so often: proxies close connections on which nothing comes for a minute."""
RETRY_AFTER_S = 10
"""A model needs some time to load."""


class HoldingRoom:
    """
    Args:
        hold_s: how long a request is held; 0: none ever is.
        limit: requests held at the same time.
    """

    def __init__(
        self, pool: EnginePool, metrics: GatewayMetrics, *, hold_s: float, limit: int
    ) -> None:
        self._pool = pool
        self._hold_s = hold_s
        self._limit = limit
        self._held: set[asyncio.Timeout] = set()
        metrics.held.set_function(lambda: len(self._held))

    @property
    def is_open(self) -> bool:
        """Whether requests are welcome though no engine is there."""
        return self._hold_s > 0

    async def wait(self, keep_alive: Callable[[], Awaitable[None]]) -> None:
        """Returns as soon as a decode engine takes requests.

        Args:
            keep_alive: awaited every KEEP_ALIVE_S.

        Raises:
            APIError: 503, none has come in time, or too many requests wait already.
        """
        if not self.is_open or self._pool.available("decode"):
            return
        if len(self._held) >= self._limit:
            raise _refusal(
                f"{len(self._held)} requests wait for an engine to start already; retry later."
            )
        timeout = asyncio.timeout(self._hold_s)
        self._held.add(timeout)
        try:
            async with timeout:
                while await self._pool.wait_decode(KEEP_ALIVE_S) is None:
                    await keep_alive()
        except TimeoutError:
            raise _refusal("No engine started in time; retry later.") from None
        finally:
            self._held.discard(timeout)

    def dismiss_all(self) -> None:
        """Whoever is held is told now that there will be no engine: this gateway ends."""
        now = asyncio.get_running_loop().time()
        for timeout in self._held:
            timeout.reschedule(now)


def _refusal(message: str) -> APIError:
    return APIError(503, message, code="no_ready_engine", retry_after_s=RETRY_AFTER_S)
