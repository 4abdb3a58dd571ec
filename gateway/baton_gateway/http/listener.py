"""The listening socket, the normalization of paths, and the response to invalid HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http import RawRequestMessage

from baton_gateway.errors import APIError, gateway_failure
from baton_gateway.http.cors import CORS
from baton_gateway.http.request_id import REQUEST_ID_HEADER, request_id

logger = logging.getLogger(__name__)

#: Number of connections that the kernel queues until the gateway accepts them.
BACKLOG = 1024

_SLASHES = re.compile("//+")


def response_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers that every response has."""
    # aiohttp's default for Server names the versions of Python and aiohttp.
    return {hdrs.SERVER: "baton", REQUEST_ID_HEADER: request_id(request)}


class Connection(web.RequestHandler):
    """A connection that answers malformed requests in the format of OpenAI's errors.

    Neither the response nor the log quotes the request, because a header may contain an API key.
    """

    __slots__ = ("_cors",)

    def __init__(self, manager: web.Server, cors: CORS) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(manager, loop=loop, access_log=None)  # type: ignore[arg-type]
        self._cors = cors

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response is sent already")
        name = request_id(request)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("[%s] a request from %s failed", name, request.remote, exc_info=exc)
            error = gateway_failure(name)
        else:
            problem = type(exc).__name__
            logger.info("[%s] %s sent no valid HTTP request: %s", name, request.remote, problem)
            message = f"This is no valid HTTP request: {problem}."
            error = APIError(status, message, code="invalid_http")
        response = web.Response(
            status=error.status,
            body=msgspec.json.encode(error.body),
            content_type="application/json",
            headers=response_headers(request) | self._cors.headers(request),
        )
        response.force_close()
        return response


async def listen(
    runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None, cors: CORS
) -> asyncio.Server:
    """Listen on `host` and `port`, and serve the application of `runner`.

    Args:
        runner: the runner of the application. Its `setup` must have been called.
        host: address to bind.
        port: port to bind; 0: any free port.
        context: the TLS context; None: HTTP without TLS.
        cors: sets the CORS headers of responses to invalid HTTP.

    Raises:
        OSError: the port is in use.
    """
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner must be set up"
    make_request = manager.request_factory

    def make_normalized(message: RawRequestMessage, *connection: Any) -> web.BaseRequest:
        return make_request(normalize_path(message), *connection)

    manager.request_factory = make_normalized
    return await loop.create_server(
        lambda: Connection(manager, cors), host, port, ssl=context, backlog=BACKLOG
    )


def normalize_path(message: RawRequestMessage) -> RawRequestMessage:
    """Replace repeated slashes in the path by one slash, and drop a slash at the end.

    Routes, API keys and metrics then have one path per endpoint, and a POST needs no redirect.
    """
    path = message.url.raw_path
    normalized = _SLASHES.sub("/", path)
    if normalized != "/":
        normalized = normalized.removesuffix("/")
    if normalized == path:
        return message
    return message._replace(url=message.url.with_path(normalized, encoded=True, keep_query=True))


async def stop_listening(listener: asyncio.Server) -> None:
    """Stop accepting connections, and close `listener`.

    Before closing, the function waits until asyncio has created a transport for each accepted
    connection. A connection without a transport would stay open, and its client would wait forever.
    """
    loop = asyncio.get_running_loop()
    for socket in listener.sockets:
        loop.remove_reader(socket.fileno())
    await asyncio.sleep(0)
    listener.close()
