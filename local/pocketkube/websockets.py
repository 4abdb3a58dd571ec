"""Accept WebSockets and read their messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence

import aiohttp
from aiohttp import web

#: Interval of the pongs that detect a disconnected client.
HEARTBEAT_S = 1.0
#: Maximum wait for the client's answer to a close message. A client whose output is paused, for
#: example by a pager, answers late. aiohttp's default of 10 s would truncate the output.
CLOSE_S = 3600.0


def create_socket(protocols: Sequence[str]) -> web.WebSocketResponse:
    """Create the server's end of a WebSocket that supports the subprotocols `protocols`."""
    return web.WebSocketResponse(protocols=protocols, max_msg_size=0, timeout=CLOSE_S)


async def accept(request: web.Request, protocols: Sequence[str]) -> web.WebSocketResponse:
    """Accept the WebSocket that `request` opens with one of the subprotocols `protocols`.

    Raises:
        HTTPBadRequest: the request does not open a WebSocket with one of the subprotocols.
    """
    socket = create_socket(protocols)
    if socket.can_prepare(request).protocol is None:
        raise web.HTTPBadRequest(text=f"use a WebSocket with {' or '.join(protocols)}\n")
    await socket.prepare(request)
    return socket


async def messages(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    """Yield the messages until the client closes the socket. Encode text messages as UTF-8."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
        elif message.type is aiohttp.WSMsgType.TEXT:
            yield message.data.encode()


async def run_until_closed(
    socket: web.WebSocketResponse, receive: Awaitable[None], work: Awaitable[None]
) -> bool:
    """Run `receive` and `work` until one ends or the client disconnects, then cancel the rest.

    `receive` must end when the client closes `socket`. If `work` has failed, raise its error.

    Returns:
        True if `work` has ended; False if the client closed the socket or disconnected first.
    """
    working = asyncio.ensure_future(work)
    tasks = {asyncio.ensure_future(receive), working, asyncio.ensure_future(_heartbeat(socket))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if has_ended := working.done():
            working.result()
        return has_ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _heartbeat(socket: web.WebSocketResponse) -> None:
    """Send pongs without content until the client has disconnected.

    While this server waits to forward a message, it does not read from the client. Then only a
    failed send shows that the client has disconnected.

    A pong needs no answer (RFC 6455, section 5.5.3). A ping could stay unanswered: kubectl answers
    only after its current write, and that write may wait until this server reads.
    """
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        # Without shield(), the cancellation of this task would end all tasks that wait for the
        # socket: in aiohttp they await the same future.
        await asyncio.shield(socket.pong())
