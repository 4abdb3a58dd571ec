"""The time in which a request must end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton_gateway.errors import timed_out


class RequestDeadline:
    """The deadline of one request. The timeout starts when this object is created.

    Args:
        timeout_s: longest time until the end of the response. 0: no limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s or math.inf
        self._at = asyncio.get_running_loop().time() + self._timeout_s

    @property
    def left_s(self) -> float:
        return self._at - asyncio.get_running_loop().time()

    @asynccontextmanager
    async def enforced(self) -> AsyncGenerator[None, None]:
        """Run the `with` block, and cancel it at the deadline.

        Raises:
            APIError: the deadline has passed.
        """
        try:
            async with asyncio.timeout_at(self._at):
                yield
        except TimeoutError:
            raise timed_out(self._timeout_s) from None

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None, None]:
        """Run the `with` block, and then postpone the deadline by the time that the block took."""
        started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._at += asyncio.get_running_loop().time() - started
