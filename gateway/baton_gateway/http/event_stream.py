"""The server-sent events of one response.

The response starts with the first output or the first keep-alive comment. A failure before that
start is sent as an HTTP status, and a later failure as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from aiohttp import web

from baton_gateway.http.slow_clients import abort_connection, fits_into_buffer

#: A failed stream waits this long for its client to read the error.
ERROR_TIMEOUT_S = 1.0
# A line that begins with a colon is a comment, which OpenAI's clients skip.
_COMMENT = b": no engine is ready yet, one is being started\n\n"


class EventStream:
    """A response of server-sent events, which starts when `open` is called.

    Args:
        client_timeout_s: time in seconds in which the client must read an event. A slower client
            is disconnected. Events that fit into the connection's buffer have no timeout.
    """

    def __init__(self, http: web.Request, *, client_timeout_s: float) -> None:
        self._http = http
        self._client_timeout_s = client_timeout_s
        self._response: web.StreamResponse | None = None

    @property
    def is_open(self) -> bool:
        """Whether status 200 was sent."""
        return self._response is not None

    async def open(self) -> web.StreamResponse:
        """Send status 200, unless it was sent before. Return the response.

        Raises:
            ConnectionError: the client has disconnected.
        """
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._http)
        return self._response

    async def keep_alive(self) -> None:
        """Send a comment, so that proxies keep the connection open.

        If the client has disconnected, no error is raised, because aiohttp cancels the request's
        handler in that case.
        """
        with contextlib.suppress(ConnectionError):
            response = await self.open()
            await self._bounded(response.write(_COMMENT), self._client_timeout_s)

    async def send(self, event: bytes, name: str = "") -> None:
        """Send the JSON `event` as one server-sent event.

        Args:
            event: the data.
            name: name of the event, or an empty string if it has no name.

        Raises:
            ConnectionError: the client has disconnected, or did not read the event in time.
        """
        response = self._response if self._response is not None else await self.open()
        head = b"event: %b\n" % name.encode() if name else b""
        write = response.write(head + b"data: " + event + b"\n\n")
        if fits_into_buffer(self._http, len(event)):
            await write  # does not wait for the client, and a timeout per token would cost CPU time
        else:
            await self._bounded(write, self._client_timeout_s)

    async def end(self, last: bytes, name: str = "") -> None:
        """Send the last event and end the response.

        Args:
            last: data of the event. If it is empty, no event is sent.
            name: name of the event, or an empty string if it has no name.

        Raises:
            ConnectionError: the client has disconnected, or did not read the events in time.
        """
        if last:
            await self.send(last, name)
        response = await self.open()
        await self._bounded(response.write_eof(), self._client_timeout_s)

    async def fail(self, body: bytes, name: str) -> None:
        """Send the JSON error `body` as a last event named `name`, and end the response.

        Raises:
            ConnectionError: the client has disconnected, or did not read the error in time.
        """
        await self._bounded(self.end(body, name), ERROR_TIMEOUT_S)

    async def _bounded(self, write: Awaitable[None], timeout_s: float) -> None:
        """Await `write`. If this takes more than `timeout_s`, disconnect the client.

        Raises:
            ConnectionError: the client has disconnected, or was disconnected by this method.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await write
        except TimeoutError:
            abort_connection(self._http, self._http.path)
            raise ConnectionResetError("the client does not read its response") from None
