"""Graceful shutdown: serve until clients and proxies send their requests to other gateways.

A Service, its proxies and the load balancers in front need a moment to notice that a gateway is no
longer ready. Requests that arrive in this moment must not fail.
"""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import OPEN_PATHS


class GracefulShutdown:
    """The first phase of a shutdown.

    Once it `has_begun`, /ready answers 503, requests are still served, and every response closes
    its connection, so that the client's next one goes to another gateway.

    Args:
        quiet_s: the phase ends when no request has arrived for this long.
    """

    def __init__(self, admission: Admission, quiet_s: float) -> None:
        self._admission = admission
        self._quiet_s = quiet_s
        self._last_arrival = 0.0
        self.has_begun = False

    def on_request(self, path: str) -> None:
        if path not in OPEN_PATHS:  # those come from the kubelet and Prometheus, not from clients
            self._last_arrival = asyncio.get_running_loop().time()

    async def close_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        """Close the connection after `response`. Call it before the headers are sent."""
        if self.has_begun:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    async def wait_quiet(self, timeout_s: float) -> None:
        """Begin the phase, and return at its end or after `timeout_s`.

        It ends when no request is in flight and none has arrived for `quiet_s`.
        """
        loop = asyncio.get_running_loop()
        self.has_begun, self._last_arrival = True, loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                while (
                    wait_s := self._last_arrival + self._quiet_s - loop.time()
                ) > 0 or not self._admission.is_idle:
                    await asyncio.sleep(max(wait_s, 0.0))
                    await self._admission.wait_idle()
        except TimeoutError:
            pass
