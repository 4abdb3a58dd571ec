"""Admission control: limits the sequences in flight, and waits until no request is left."""

from __future__ import annotations

import asyncio
from collections import Counter

from baton_gateway.errors import APIError, overloaded, unavailable
from baton_gateway.metrics import GatewayMetrics


class Admission:
    """Counts requests and sequences in flight, and refuses requests above the limits.

    Args:
        limit: maximum number of sequences in flight. A request for n samples counts as n sequences.
        client_limit: maximum number of sequences in flight for each client; None: no limit.
    """

    def __init__(
        self, limit: int, metrics: GatewayMetrics, *, client_limit: int | None = None
    ) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._by_client: Counter[str] = Counter()
        self._metrics = metrics
        self._num_sequences = 0
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        #: Set when the gateway accepts no more requests.
        self.is_closed = False

    def check_open(self) -> None:
        """Raise APIError (503) if the gateway accepts no more requests."""
        if self.is_closed:
            raise unavailable(
                "This gateway is shutting down; retry, another one will answer.", code="draining"
            )

    def begin(self) -> None:
        """Count a new request in flight. The caller must call `end` when the request ends."""
        self._num_requests += 1
        self._idle.clear()
        self._metrics.in_flight.set(self._num_requests)

    def end(self) -> None:
        self._num_requests -= 1
        self._metrics.in_flight.set(self._num_requests)
        if self._num_requests == 0:
            self._idle.set()

    def acquire(self, num_sequences: int, client: str | None = None) -> None:
        """Count `num_sequences` more sequences in flight. The caller must call `release` later.

        Raises:
            APIError: 400 if the request can never fit the limits, 429 if it does not fit now.
        """
        client_limit = None if client is None else self._client_limit
        limit = self._limit if client_limit is None else min(self._limit, client_limit)
        if num_sequences > limit:
            raise APIError(
                400,
                f"One request may ask for at most {limit} sequences, got {num_sequences}.",
                param="n",
            )
        if self._num_sequences + num_sequences > self._limit:
            raise overloaded(f"{self._num_sequences} sequences are running already; retry later.")
        if client is not None:
            running = self._by_client[client]
            if client_limit is not None and running + num_sequences > client_limit:
                raise overloaded(
                    f"{running} sequences of this API key are running already; retry later."
                )
            self._by_client[client] += num_sequences
        self._num_sequences += num_sequences

    def release(self, num_sequences: int, client: str | None = None) -> None:
        """Subtract `num_sequences` sequences, which `acquire` counted for the same `client`."""
        self._num_sequences -= num_sequences
        if client is not None:
            self._by_client[client] -= num_sequences
            if not self._by_client[client]:
                del self._by_client[client]

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return self._idle.is_set()

    async def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is in flight. Return False if `timeout_s` passes first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
