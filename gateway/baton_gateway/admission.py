"""Admission: how much is served at once, and when everything has ended."""

from __future__ import annotations

import asyncio

from baton_gateway.errors import APIError, overloaded, unavailable
from baton_gateway.metrics import GatewayMetrics


class Admission:
    """Counts what is being served, refuses what is too much, and knows when everything has ended.

    Args:
        limit: sequences in flight; a request for n samples counts n times.
    """

    def __init__(self, limit: int, metrics: GatewayMetrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._sequences = 0
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def check_draining(self) -> None:
        """Raises APIError (503) once the gateway is shutting down."""
        if self.draining:
            raise unavailable("This gateway is shutting down; retry, another one will answer.", code="draining")

    def begin(self) -> None:
        """A request arrived; `end` must follow."""
        self._requests += 1
        self._idle.clear()
        self._metrics.in_flight.set(self._requests)

    def end(self) -> None:
        self._requests -= 1
        self._metrics.in_flight.set(self._requests)
        if self._requests == 0:
            self._idle.set()

    def take(self, sequences: int) -> None:
        """Raises APIError: 400 if it can never fit, 429 if it does not fit now. `give` must follow."""
        if sequences > self._limit:
            raise APIError(400, f"One request may ask for {self._limit} sequences at most, got {sequences}.", param="n")
        if self._sequences + sequences > self._limit:
            raise overloaded(f"{self._sequences} sequences are being served already; retry later.")
        self._sequences += sequences

    def give(self, sequences: int) -> None:
        self._sequences -= sequences

    async def wait_idle(self, timeout_s: float) -> bool:
        """False if requests are still being served after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
