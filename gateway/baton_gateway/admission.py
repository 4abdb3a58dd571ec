"""Admission: how much is served at once, and when everything has ended."""

from __future__ import annotations

import asyncio
from collections import Counter

from baton_gateway.errors import APIError, overloaded, unavailable
from baton_gateway.metrics import GatewayMetrics


class Admission:
    """Counts what is being served, refuses what is too much, and knows when everything has ended.

    Args:
        limit: sequences in flight; a request for n samples counts n times.
        client_limit: of those, sequences of one client with an API key. None: no limit of its own.
    """

    def __init__(
        self, limit: int, metrics: GatewayMetrics, *, client_limit: int | None = None
    ) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._by_client: Counter[str] = Counter()
        self._metrics = metrics
        self._sequences = 0
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def check_draining(self) -> None:
        """Raises APIError (503) once the gateway is shutting down."""
        if self.draining:
            raise unavailable(
                "This gateway is shutting down; retry, another one will answer.", code="draining"
            )

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

    def take(self, sequences: int, client: str | None = None) -> None:
        """Raises APIError: 400 if it can never fit, 429 if it does not fit now. `give` must follow."""
        client_limit = None if client is None else self._client_limit
        most = self._limit if client_limit is None else min(self._limit, client_limit)
        if sequences > most:
            raise APIError(
                400,
                f"One request may ask for {most} sequences at most, got {sequences}.",
                param="n",
            )
        if self._sequences + sequences > self._limit:
            raise overloaded(f"{self._sequences} sequences are being served already; retry later.")
        if client is not None:
            if client_limit is not None and self._by_client[client] + sequences > client_limit:
                raise overloaded(
                    f"{self._by_client[client]} sequences of this API key are being served; retry later."
                )
            self._by_client[client] += sequences
        self._sequences += sequences

    def give(self, sequences: int, client: str | None = None) -> None:
        """As many as were taken, and for the same client."""
        self._sequences -= sequences
        if client is not None:
            self._by_client[client] -= sequences
            if not self._by_client[client]:
                del self._by_client[client]

    @property
    def idle(self) -> bool:
        """Nothing is being served."""
        return self._idle.is_set()

    async def until_idle(self) -> None:
        await self._idle.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """False if requests are still being served after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.until_idle()
        except TimeoutError:
            return False
        return True
