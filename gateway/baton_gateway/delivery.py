"""Answers on their way to clients: one that does not read must not hold what was made for it for ever."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from baton_gateway.access import client_name

logger = logging.getLogger(__name__)

BUFFERED_BYTES = 2**16
"""Smaller bodies fit the connection's own buffer."""


def is_unread(http: web.Request) -> bool:
    """Whether the client has not taken all that was sent to it."""
    return http.transport is not None and http.transport.get_write_buffer_size() > 0


def hang_up(http: web.Request, name: str) -> None:
    """Closes the connection and forgets what is on its way. `name` is the request's, for the log."""
    if http.transport is not None and not http.transport.is_closing():
        logger.warning(
            "%s%s: the client does not read, closing its connection", name, client_name(http)
        )
        http.transport.abort()


def hang_up_if_unread(http: web.Request, name: str) -> None:
    """To be called when much is waiting for the client: else it is this gateway that is late."""
    if is_unread(http):
        hang_up(http, name)


async def deliver(http: web.Request, body: bytes, deadline: float) -> web.Response:
    """The answer with this JSON `body`. One that is large is sent here, so that its request counts until the client has taken it;
    a client that has not by `deadline`, on the event loop's clock, is hung up on."""
    response = web.Response(body=body, content_type="application/json")
    if len(body) > BUFFERED_BYTES:
        try:
            async with asyncio.timeout_at(deadline):
                await response.prepare(http)
                await response.write_eof()
        except TimeoutError:
            hang_up(http, http.path)
        except ConnectionError:
            logger.info("%s%s: the client went away", http.path, client_name(http))
    return response
