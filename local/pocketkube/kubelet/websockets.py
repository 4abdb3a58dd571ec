"""Accept WebSockets and read their messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence

import aiohttp
from aiohttp import web


async def accept(request: web.Request, protocols: Sequence[str]) -> web.WebSocketResponse:
    """Accept a WebSocket with one of the subprotocols.

    Raises:
        HTTPBadRequest: the client requests no WebSocket with one of the subprotocols.
    """
    socket = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
    if socket.can_prepare(request).protocol is None:
        raise web.HTTPBadRequest(text=f"use a WebSocket with {' or '.join(protocols)}\n")
    await socket.prepare(request)
    return socket


async def messages(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    """Yield the client's messages until it closes the socket. Text messages are encoded."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
        elif message.type is aiohttp.WSMsgType.TEXT:
            yield message.data.encode()


async def run_until_closed(receive: Awaitable[None], work: Awaitable[None]) -> bool:
    """Run `receive`, which ends when the client closes its socket, and `work` until one ends.

    Cancel the other one. If `work` has failed, raise its error.

    Returns:
        Whether `work` has ended.
    """
    receiving, working = asyncio.ensure_future(receive), asyncio.ensure_future(work)
    try:
        await asyncio.wait({receiving, working}, return_when=asyncio.FIRST_COMPLETED)
        if has_ended := working.done():
            working.result()
        return has_ended
    finally:
        receiving.cancel()
        working.cancel()
        await asyncio.gather(receiving, working, return_exceptions=True)
