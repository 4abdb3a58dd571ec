"""Admission control: limits the sequences in flight, and waits until no request is in flight.

A sequence is one sample of one prompt. A request has one sequence or more. The entries of long
options, such as `logit_bias`, are limited too, because they take memory while a request runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from baton_gateway.errors import APIError, overloaded, unavailable
from baton_gateway.metrics import GatewayMetrics
from baton_text.requests.generation_request import MAX_OPTION_ENTRIES

#: Limit on the entries of long options of all requests in flight. The limit of one client is
#: MAX_OPTION_ENTRIES.
MAX_TOTAL_OPTION_ENTRIES = 4 * MAX_OPTION_ENTRIES


class Admission:
    """Counts requests and sequences in flight, and refuses requests above the limits.

    Args:
        limit: maximum number of sequences in flight.
        client_limit: maximum number of sequences in flight for each client; None: no limit.
            Clients are distinguished by their API keys.
    """

    def __init__(
        self, limit: int, metrics: GatewayMetrics, *, client_limit: int | None = None
    ) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._by_client: Counter[str] = Counter()
        self._metrics = metrics
        self._num_sequences = 0
        self._num_options = 0
        self._options_by_client: Counter[str] = Counter()
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        #: Whether the gateway accepts no more requests.
        self.is_closed = False

    def check_open(self) -> None:
        """Raise APIError (503) if the gateway accepts no requests because it shuts down."""
        if self.is_closed:
            raise unavailable(
                "This gateway is shutting down; retry, another one will answer.", code="draining"
            )

    @contextmanager
    def request(self, client: str | None) -> Iterator[Reservation]:
        """Count a request in flight, and reserve one sequence, until the `with` block ends.

        Args:
            client: as for `reserve`.

        Raises:
            APIError: as for `reserve`.
        """
        self._num_requests += 1
        self._idle.clear()
        self._metrics.in_flight.set(self._num_requests)
        try:
            with self.reserve(client) as reservation:
                yield reservation
        finally:
            self._num_requests -= 1
            self._metrics.in_flight.set(self._num_requests)
            if self._num_requests == 0:
                self._idle.set()

    @contextmanager
    def reserve(self, client: str | None) -> Iterator[Reservation]:
        """Reserve one sequence until the `with` block ends.

        Call this method before the body is read, so that the limits also count requests whose
        bodies arrive slowly.

        Args:
            client: name of the client. None: only the limit of the whole gateway applies.

        Raises:
            APIError: 429, because the sequences in flight leave no room, or 503, because the
                gateway shuts down.
        """
        self.check_open()
        reservation = Reservation(self, client)
        reservation.resize(1)
        try:
            yield reservation
        finally:
            reservation.release()

    def _acquire(self, num_sequences: int, num_options: int, client: str | None) -> None:
        """Count `num_sequences` more sequences in flight.

        Args:
            num_sequences: sequences of the request.
            num_options: `GenerationRequest.num_options` of the request.
            client: name of the client. None: only the limits of the whole gateway apply.

        Raises:
            APIError: 400 if the request alone has more sequences than a limit, 429 if the requests
                in flight leave too little room.
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
            raise overloaded(
                f"{self._num_sequences} of at most {self._limit} sequences are running already; "
                "retry later."
            )
        if num_options:
            running, allowed = self._num_options, MAX_TOTAL_OPTION_ENTRIES
            if client is not None and running + num_options <= allowed:
                running, allowed = self._options_by_client[client], MAX_OPTION_ENTRIES
            if running + num_options > allowed:
                raise overloaded(
                    f"Running requests have {running} entries of long options, of at most "
                    f"{allowed}; retry later, or send shorter options."
                )
        if client is not None:
            running = self._by_client[client]
            if client_limit is not None and running + num_sequences > client_limit:
                raise overloaded(
                    f"{running} of at most {client_limit} sequences of this API key are running "
                    "already; retry later."
                )
            self._by_client[client] += num_sequences
            self._options_by_client[client] += num_options
        self._num_sequences += num_sequences
        self._num_options += num_options

    def _release(self, num_sequences: int, num_options: int, client: str | None) -> None:
        """Subtract what `_acquire` counted for the same `client`."""
        self._num_sequences -= num_sequences
        self._num_options -= num_options
        if client is not None and num_sequences:
            self._by_client[client] -= num_sequences
            self._options_by_client[client] -= num_options
            if not self._by_client[client]:
                del self._by_client[client], self._options_by_client[client]

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


class Reservation:
    """The sequences and `num_options` of one request, which count toward `Admission`'s limits."""

    def __init__(self, admission: Admission, client: str | None) -> None:
        self._admission = admission
        self._client = client
        self._num_sequences = 0
        self._num_options = 0

    def resize(self, num_sequences: int, num_options: int = 0) -> None:
        """Count the request as `num_sequences` sequences.

        Args:
            num_sequences: sequences of the request.
            num_options: `GenerationRequest.num_options` of the request.

        Raises:
            APIError: 400 if the request alone has more sequences than a limit, 429 if the requests
                in flight leave too little room. In both cases, the reservation is released.
        """
        self.release()
        self._admission._acquire(num_sequences, num_options, self._client)
        self._num_sequences, self._num_options = num_sequences, num_options

    def release(self) -> None:
        """Stop counting the sequences and `num_options` of the request."""
        self._admission._release(self._num_sequences, self._num_options, self._client)
        self._num_sequences = self._num_options = 0
