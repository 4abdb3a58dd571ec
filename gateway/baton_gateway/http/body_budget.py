"""Reads request bodies within a time, and within a budget of bytes over all connections.

The number of bodies that one client sends at once is limited too. So a client that sends heads
without bodies cannot reserve all sequences that `admission` allows.

The bytes of a body count until the request's prompt is tokenized or the request is refused. After
that, the limits of `admission` and of the model bound the memory of a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import ClientPayloadError, web
from aiohttp.http import HttpProcessingError

from baton_gateway.access.api_keys import CLIENT
from baton_gateway.errors import APIError, overloaded, unavailable
from baton_gateway.metrics import GatewayMetrics

#: A body must arrive within this time, plus its size divided by MIN_BODY_RATE.
BODY_TIMEOUT_S = 30.0
#: Bytes per second.
MIN_BODY_RATE = 2**16
#: Limit on one body.
MAX_BODY_BYTES = 16 * 2**20
#: Limit on the bytes of all bodies whose prompts are not yet tokenized.
MAX_TOTAL_BODY_BYTES = 96 * 2**20
#: A body is kept in pieces of about this size while it arrives. Hundreds of large arrays that grow
#: at the same time would be copied many times, and would fragment the memory.
PIECE_BYTES = 2**16


class BodyBudget:
    """Limit on the total bytes of request bodies until they are tokenized, and of large responses.

    When MAX_TOTAL_BODY_BYTES is exceeded, the largest request of the client with the most bytes is
    refused with 503. Without API keys, each request counts as a separate client. So small requests
    are served even while many large requests arrive.

    Args:
        client_limit: maximum number of bodies of one client that are read at the same time. Clients
            are distinguished by their API keys. Without API keys, there is no such limit.
    """

    def __init__(self, metrics: GatewayMetrics, *, client_limit: int) -> None:
        self._client_limit = client_limit
        self._num_read: Counter[str] = Counter()
        self._num_bytes = 0
        self._charges: set[BodyCharge] = set()
        self._num_bytes_of: Counter[str] = Counter()
        metrics.body_bytes.set_function(lambda: self._num_bytes)

    @asynccontextmanager
    async def charge(self, client: str | None) -> AsyncGenerator[BodyCharge, None]:
        """Charge the budget with the bytes of one body until the `with` block ends.

        Args:
            client: name of the client; None if clients need no API key.

        Raises:
            APIError: 503, because the budget is exhausted and this request was refused.
        """
        charge = BodyCharge(self, client)
        self._charges.add(charge)
        try:
            async with charge.timeout:
                yield charge
        except TimeoutError:
            if charge in self._charges:
                raise
            raise _exhausted() from None
        finally:
            self._remove(charge)

    def add(self, charge: BodyCharge, num_bytes: int) -> None:
        """Add `num_bytes` to `charge`. If the budget is exceeded, refuse the largest requests.

        Raises:
            APIError: 503, because the budget is exhausted and `charge`'s request was refused.
        """
        if charge not in self._charges:  # refused, and its handler still runs
            raise _exhausted()
        self._count(charge, num_bytes)
        self._make_room()
        if charge not in self._charges:
            charge.timeout.reschedule(None)
            raise _exhausted()

    def add_response(self, charge: BodyCharge, num_bytes: int) -> None:
        """Add a finished response to `charge`, which must be empty.

        This call refuses no requests to make room for the response, even if the response exceeds
        the budget. The next call that adds bytes refuses requests if the budget is still exceeded.
        """
        self._make_room()
        self._count(charge, num_bytes)

    def _make_room(self) -> None:
        """Refuse the largest requests until the rest fits into the budget."""
        while self._num_bytes > MAX_TOTAL_BODY_BYTES:
            largest = max(self._charges, key=self._size)
            self._remove(largest)
            largest.timeout.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def reading(self, client: str | None) -> Iterator[None]:
        """Count a body of `client` as being read, until the `with` block ends.

        Raises:
            APIError: 429, because too many bodies of the client are being read.
        """
        if client is None:
            yield
            return
        if self._num_read[client] >= self._client_limit:
            raise overloaded(
                f"{self._client_limit} bodies of requests with this API key are arriving already; "
                "retry later."
            )
        self._num_read[client] += 1
        try:
            yield
        finally:
            self._num_read[client] -= 1
            if not self._num_read[client]:
                del self._num_read[client]

    def _remove(self, charge: BodyCharge) -> None:
        if charge in self._charges:
            self._charges.remove(charge)
            self._count(charge, -charge.num_bytes)

    def _count(self, charge: BodyCharge, num_bytes: int) -> None:
        charge.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if charge.client is not None:
            self._num_bytes_of[charge.client] += num_bytes
            if not self._num_bytes_of[charge.client]:
                del self._num_bytes_of[charge.client]

    def _size(self, charge: BodyCharge) -> tuple[int, int]:
        """Return a sort key: the bytes of all charges of the same client, then of this charge."""
        if charge.client is None:
            return charge.num_bytes, charge.num_bytes
        return self._num_bytes_of[charge.client], charge.num_bytes


class BodyCharge:
    """The bytes of one request, or of its response, that count in a BodyBudget."""

    def __init__(self, budget: BodyBudget, client: str | None) -> None:
        self._budget = budget
        self.client = client
        self.num_bytes = 0
        #: Ends the request of this body. It has a deadline only if the request is refused.
        self.timeout = asyncio.timeout(None)

    def add(self, num_bytes: int) -> None:
        """Charge memory, in bytes, that the request takes in addition to its body.

        Raises:
            APIError: 503, because the budget is exhausted and this request was refused.
        """
        self._budget.add(self, num_bytes)

    def add_response(self, num_bytes: int) -> None:
        """Charge a finished response until its client has read it. The charge must be empty."""
        self._budget.add_response(self, num_bytes)

    async def read(self, http: web.Request, timeout_s: float) -> bytes:
        """Return the body of the request, and charge its bytes as they arrive.

        Args:
            http: the request.
            timeout_s: longest time for the whole body, however large it is.

        Raises:
            APIError: 400 if the body contradicts its headers. 408 if the body does not arrive in
                time. 413 if the body is too large. 429 if the client sends too many bodies at once.
                503 if the budget is exhausted.
        """
        if (http.content_length or 0) > MAX_BODY_BYTES:
            raise _too_large()
        if http.content.is_eof():  # the body has arrived together with the head
            return await self._read(http, timeout_s)
        with self._budget.reading(http.get(CLIENT)):
            return await self._read(http, timeout_s)

    async def _read(self, http: web.Request, timeout_s: float) -> bytes:
        pieces: list[bytearray] = []
        num_bytes = 0
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout_at(started + min(BODY_TIMEOUT_S, timeout_s)) as timeout:
                while chunk := await http.content.readany():
                    num_bytes += len(chunk)
                    if num_bytes > MAX_BODY_BYTES:
                        raise _too_large()
                    self._budget.add(self, len(chunk))
                    # `readany` returns decompressed bytes without waiting, so other tasks must run.
                    if num_bytes > PIECE_BYTES:
                        await asyncio.sleep(0)
                    if pieces and len(pieces[-1]) + len(chunk) <= PIECE_BYTES:
                        pieces[-1] += chunk
                    else:
                        pieces.append(bytearray(chunk))
                    allowed_s = min(BODY_TIMEOUT_S + num_bytes / MIN_BODY_RATE, timeout_s)
                    timeout.reschedule(started + allowed_s)
        except TimeoutError:
            waited_s = loop.time() - started
            raise APIError(
                408,
                f"The body did not arrive in time: {num_bytes} bytes in {waited_s:.0f} s.",
                code="timeout",
            ) from None
        except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as error:
            raise APIError(400, f"The body cannot be read: {error}", code="invalid_body") from error
        return b"".join(pieces)


def _too_large() -> APIError:
    message = f"The request body is larger than {MAX_BODY_BYTES} bytes."
    return APIError(413, message, code="request_too_large")


def _exhausted() -> APIError:
    return unavailable(
        "The bodies of all requests together are too large at the moment; retry later.",
        code="too_many_bytes",
    )
