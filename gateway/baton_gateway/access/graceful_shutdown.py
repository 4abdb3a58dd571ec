"""Graceful shutdown: serve until clients and proxies send their requests to other gateways.

Services, proxies and load balancers take a moment to notice that a gateway is no longer ready.
Requests that arrive in this time must not fail.
"""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import OPEN_PATHS


class GracefulShutdown:
    """The first phase of a shutdown, in which the gateway still serves requests.

    In this phase /ready returns 503. Every response closes its connection, so that the client's
    next request goes to another gateway.

    Args:
        admission: counts the requests in flight.
        quiet_s: the phase ends after this many seconds without a new request.
    """

    def __init__(self, admission: Admission, quiet_s: float) -> None:
        self._admission = admission
        self._quiet_s = quiet_s
        self._last_arrival = 0.0
        self.has_begun = False

    def on_request(self, path: str) -> None:
        if path not in OPEN_PATHS:  # only load balancers request the open paths
            self._last_arrival = asyncio.get_running_loop().time()

    async def close_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        """Make `response` close its connection, if the graceful shutdown has begun.

        aiohttp calls this method before it sends the headers.
        """
        if self.has_begun:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    async def wait_quiet(self, timeout_s: float) -> None:
        """Begin the shutdown's first phase. Return when the phase ends or `timeout_s` has passed.

        The phase ends when no request is in flight and no request has arrived for `quiet_s`.
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
