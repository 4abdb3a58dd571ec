"""Going out of service without a failed request: those who send requests learn of it a moment after it was decided."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from baton_gateway.admission import Admission

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Who asks here does not send requests."""


class Departure:
    """Once `begun`, /ready says no, whatever comes is served, and every answer asks its client to connect anew: to another gateway,
    as soon as the Service, the proxies and the load balancers in front have heard of it.

    Args:
        quiet_s: when nobody has asked for anything for so long, they have.
    """

    def __init__(self, admission: Admission, quiet_s: float) -> None:
        self._admission = admission
        self._quiet_s = quiet_s
        self._last_arrival = 0.0
        self.begun = False

    def arrived(self, path: str) -> None:
        """A request was received."""
        if path not in PROBES:
            self._last_arrival = asyncio.get_running_loop().time()

    async def sign(self, _: web.Request, response: web.StreamResponse) -> None:
        """To be called before the headers of an answer are sent."""
        if self.begun:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    async def until_quiet(self, timeout_s: float) -> None:
        """Begins it; returns when nothing is served any more and nobody has come for a while, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        if not self.begun:
            self.begun, self._last_arrival = True, loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                while (
                    wait_s := self._last_arrival + self._quiet_s - loop.time()
                ) > 0 or not self._admission.idle:
                    await asyncio.sleep(max(wait_s, 0.0))
                    await self._admission.until_idle()
        except TimeoutError:
            pass
