"""Graceful shutdown: serve until clients and proxies send their requests to other gateways.

Services, proxies and load balancers take a moment to notice that a gateway is no longer ready.
Requests that arrive in this time must not fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from aiohttp import hdrs, web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import OPEN_PATHS

logger = logging.getLogger(__name__)

#: Time in seconds for requests to return an error, after the shutdown has ended them.
FAIL_S = 2.0


class OpenRequests(Protocol):
    """The waiting or running requests of one component of the gateway."""

    def fail_all(self) -> None:
        """End all requests with an error."""


class GracefulShutdown:
    """The two phases of a shutdown: wait until clients send no new requests, then drain.

    In the first phase, the gateway serves requests, but /ready returns 503. Every response closes
    its connection, so that the client's next request goes to another gateway.
    In the second phase, the gateway refuses new requests and waits for the running requests.

    Args:
        admission: counts the requests in flight.
        requests: the requests that fail if they still run at the end of the second phase.
        quiet_s: the first phase ends when there was no new request for this many seconds, and no
            request is in flight.
    """

    def __init__(
        self, admission: Admission, requests: Iterable[OpenRequests], quiet_s: float
    ) -> None:
        self._admission = admission
        self._requests = tuple(requests)
        self._quiet_s = quiet_s
        self._last_arrival = 0.0
        self._end = asyncio.Event()
        self.has_begun = False

    def on_request(self, path: str) -> None:
        if path not in OPEN_PATHS:  # only load balancers request the open paths
            self._last_arrival = asyncio.get_running_loop().time()

    async def close_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        """Make the server close the connection after `response`, if the shutdown has begun.

        aiohttp calls this method before it sends the headers.
        """
        if self.has_begun:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    def end(self) -> None:
        """End the current phase and any later phase now. Requests that still run fail."""
        self._end.set()

    async def wait_quiet(self, timeout_s: float) -> None:
        """Run the first phase, for at most `timeout_s`.

        The phase ends when no request is in flight and no request has arrived for `quiet_s`.
        """
        self.has_begun, self._last_arrival = True, asyncio.get_running_loop().time()
        await self._unless_ended(self._quiet(timeout_s))

    async def drain(self, timeout_s: float) -> None:
        """Run the second phase: refuse new requests, and wait for the running requests.

        Requests that still run after `timeout_s` fail.
        """
        self._admission.is_closed = True
        if await self._unless_ended(self._admission.wait_idle(timeout_s)):
            return
        cause = "a second signal" if self._end.is_set() else f"drain_timeout_s ({timeout_s:g} s)"
        logger.warning("%s has ended the graceful shutdown: requests that still run fail", cause)
        for requests in self._requests:
            requests.fail_all()
        await self._admission.wait_idle(FAIL_S)

    async def _quiet(self, timeout_s: float) -> bool:
        """Wait for the end of the first phase. Return False if `timeout_s` passes first."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while (
                    wait_s := self._last_arrival + self._quiet_s - loop.time()
                ) > 0 or not self._admission.is_idle:
                    await asyncio.sleep(max(wait_s, 0.0))
                    await self._admission.wait_idle()
        except TimeoutError:
            return False
        return True

    async def _unless_ended(self, wait: Coroutine[Any, Any, bool]) -> bool:
        """Return the result of `wait`, or return False as soon as `end` is called."""
        task, end = asyncio.create_task(wait), asyncio.create_task(self._end.wait())
        await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        end.cancel()
        await asyncio.gather(task, end, return_exceptions=True)
        return not task.cancelled() and task.result()
