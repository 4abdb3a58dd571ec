"""The answer to a streamed request, from the moment on at which something must be sent.

Nothing is sent before there is a reason to: until then a failure is an HTTP status, later it is an event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

LAST_WORDS_S = 1.0
"""A stream that failed waits this long for its client to take the error."""
_COMMENT = b": no engine is ready yet, one is being started\n\n"
"""Server-sent events: a line that begins with a colon is for nobody; OpenAI's clients skip it."""


class EventStream:
    """
    Args:
        is_wanted: whether the request asks for a stream. If not, nothing is sent before the answer is whole.
    """

    def __init__(self, http: web.Request, *, is_wanted: bool) -> None:
        self._http = http
        self._is_wanted = is_wanted
        self._response: web.StreamResponse | None = None

    @property
    def is_open(self) -> bool:
        """Whether status 200 was sent."""
        return self._response is not None

    async def open(self) -> web.StreamResponse:
        """Raises ConnectionError: the client went away."""
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._http)
        return self._response

    async def keep_alive(self) -> None:
        """Sends something that means nothing. A client that went away cancels its handler, which needs no word from here."""
        if not self._is_wanted:
            return
        with contextlib.suppress(ConnectionError):
            response = await self.open()
            await response.write(_COMMENT)

    async def fail(self, body: bytes) -> web.StreamResponse:
        """Ends a stream that has sent nothing but signs of life with the error `body`, as JSON."""
        response = await self.open()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await response.write(b"data: " + body + b"\n\n")
                await response.write_eof()
        return response
