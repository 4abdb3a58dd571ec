"""The listening sockets, and the normalization of requests."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import RawRequestMessage

from baton_gateway.http.connections import ClientConnection, Connections, TLSHandshake
from baton_gateway.http.cors import CORS

#: Limit on the connections that the kernel queues until the gateway accepts them.
MAX_BACKLOG = 1024
#: Limit on the bytes of a connection that the kernel holds before it sends them. Without a limit
#: it holds megabytes for a client that does not read, and the gateway goes on writing.
MAX_UNSENT_BYTES = 2**14

_SLASHES = re.compile("//+")
_CONTINUE = "100-continue"


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    connections: Connections,
    cors: CORS,
) -> asyncio.Server:
    """Listen on `host` and `port`, and serve the application of `runner`.

    Args:
        runner: the runner of the application. Its `setup` must have been called.
        host: address to bind.
        port: port to bind; 0: any free port.
        context: the TLS context; None for HTTP without TLS.
        connections: the open connections of this port, with a limit on their number.
        cors: sets the CORS headers of the error responses to malformed HTTP requests.

    Raises:
        OSError: the port is in use.
    """
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner must be set up"
    make_request = manager.request_factory

    def on_request(
        message: RawRequestMessage, payload: Any, connection: web.RequestHandler, *rest: Any
    ) -> web.BaseRequest:
        assert isinstance(connection, ClientConnection)
        connection.request_received(is_compressed=message.compression is not None)
        message = ignore_expectation(normalize_path(message))
        return make_request(message, payload, connection, *rest)

    def make_protocol() -> asyncio.Protocol:
        connection = ClientConnection(manager, connections, cors)
        return connection if context is None else TLSHandshake(connection, connections, context)

    manager.request_factory = on_request
    # asyncio accepts as many connections as `backlog` before it reads from any of them. With a
    # larger backlog, a burst could evict a client before its request is read.
    backlog = min(MAX_BACKLOG, max(1, connections.limit // 4))
    server = await loop.create_server(make_protocol, host, port, backlog=backlog)
    for listening in server.sockets:  # accepted connections inherit the option
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    return server


def normalize_path(message: RawRequestMessage) -> RawRequestMessage:
    """Replace repeated slashes in the path by one slash, and drop a slash at the end.

    Routing, authentication and metrics then use one path per endpoint, and no request needs a
    redirect.
    """
    path = message.url.raw_path
    normalized = _SLASHES.sub("/", path)
    if normalized != "/":
        normalized = normalized.removesuffix("/")
    if normalized == path:
        return message
    return message._replace(url=message.url.with_path(normalized, encoded=True, keep_query=True))


def ignore_expectation(message: RawRequestMessage) -> RawRequestMessage:
    """Drop an Expect header with a value other than 100-continue, as RFC 9110 allows.

    Otherwise aiohttp would refuse the request before the middlewares run. The response would not
    have the API's error format.
    """
    if message.headers.get(hdrs.EXPECT, _CONTINUE).lower() == _CONTINUE:
        return message
    headers = message.headers.copy()
    headers.popall(hdrs.EXPECT)
    return message._replace(headers=type(message.headers)(headers))


async def stop_listening(listener: asyncio.Server) -> None:
    """Stop accepting connections, and close `listener`.

    Before closing, the function waits until asyncio has created a transport for each accepted
    connection. A connection without a transport would stay open, and its client would wait forever.
    """
    loop = asyncio.get_running_loop()
    for listening in listener.sockets:
        loop.remove_reader(listening.fileno())
    await asyncio.sleep(0)
    listener.close()
