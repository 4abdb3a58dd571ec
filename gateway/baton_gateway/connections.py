"""Connections of clients: what reaches the server but is no HTTP request, and so never comes to its routes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from http import HTTPStatus

import msgspec
from aiohttp import web

from baton_gateway.errors import APIError, internal

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that wait to be accepted."""


class Connection(web.RequestHandler):
    """Answers what is malformed in OpenAI's shape, too, and repeats none of it: a header may hold a key, and many read logs."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("a request from %s failed", request.remote, exc_info=exc)
            error = internal("The gateway failed; its log says why.")
        else:
            logger.info("what %s sent is no HTTP request: %s", request.remote, type(exc).__name__)
            error = APIError(
                status, f"This is no HTTP request: {type(exc).__name__}.", code="invalid_http"
            )
        body = msgspec.json.encode(error.body)
        response = web.Response(status=error.status, body=body, content_type="application/json")
        response.force_close()
        return response


async def listen(
    runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None
) -> asyncio.Server:
    """Serves the application of `runner`, which is set up. Raises OSError if the port is taken."""
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner is set up"
    return await loop.create_server(
        lambda: Connection(manager, loop=loop, access_log=None),  # type: ignore[arg-type]  # None: no log of requests
        host,
        port,
        ssl=context,
        backlog=BACKLOG,
    )


async def stop_listening(listener: asyncio.Server) -> None:
    """Takes no more connections. One that was accepted a moment ago is given its transport first: asyncio drops it otherwise, open
    and unanswered, and its client waits for ever."""
    loop = asyncio.get_running_loop()
    for socket in listener.sockets:
        loop.remove_reader(socket.fileno())
    await asyncio.sleep(0)
    listener.close()
