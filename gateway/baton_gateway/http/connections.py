"""Connections with limits: their number, and the time in which a request must arrive.

A connection counts as soon as it is accepted, so TLS handshakes count too. While it waits for the
head of a request, it has a deadline and may be closed in favour of a new connection. While it
serves a request, the limits of `admission` and `body_budget` apply. The heads of requests that no
handler has taken yet are bounded, so clients without a key cost little memory.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import logging
import resource
import ssl
from contextlib import suppress
from typing import Any, cast

import msgspec
from aiohttp import EMPTY_PAYLOAD, StreamReader, hdrs, web

from baton_gateway.errors import APIError, error_body, gateway_failure
from baton_gateway.http.cors import CORS
from baton_gateway.http.request_id import REQUEST_ID_HEADER, request_id
from baton_gateway.metrics import GatewayMetrics
from baton_protocol.process.cgroups import memory_limit

logger = logging.getLogger(__name__)

#: The TLS handshake and the head of the first request must be complete within this time after the
#: connection is accepted. The head of a later request must be complete this long after its first
#: byte.
HEAD_TIMEOUT_S = 20.0
#: A client must read a response that fits into the buffer of the connection within this time.
WRITE_TIMEOUT_S = 75.0
#: Time from the end of a response to the first byte of the connection's next request. A proxy must
#: close idle connections first, because a request on a connection that the gateway is closing
#: fails. Go and Traefik close them after 90 s, load balancers of Google after 600 s, and Envoy
#: after an hour. At the limit of connections, idle ones are closed earlier.
KEEP_ALIVE_S = 3630.0
#: Time in which the rest of an unread body is read after the response. Closing at once would reset
#: the connection, and the client could lose the response.
LINGER_S = 10.0
#: Limit on the headers of a request.
MAX_HEADERS = 64
#: Limit on the bytes of heads that have arrived since the last complete head. Bytes that arrive in
#: the same read as that complete head also count.
MAX_HEAD_BYTES = 2**16
#: Interval at which the deadlines of connections are checked.
SWEEP_S = 1.0
#: Size of a connection's buffer for the part of a body that no handler has read yet. aiohttp stops
#: reading from the connection at twice this size.
READ_BUFFER_BYTES = 2**16
#: Limit on the bytes that one read of a connection returns, and size of the buffer of a TLS
#: connection. asyncio's default of 256 KiB would be the largest part of a connection's memory.
MAX_READ_BYTES = 2**15
#: Limit on the memory that a client without a key can make one connection take.
CONNECTION_BYTES = 2**18
#: Minimum time between two warnings that the limit of connections is reached.
LOG_INTERVAL_S = 10.0


class Connections:
    """The open connections of one port.

    Args:
        limit: maximum number of connections. At the limit, a new connection closes the
            connection that has waited longest for a request. If none waits, the new connection is
            closed.
    """

    def __init__(self, limit: int, metrics: GatewayMetrics) -> None:
        self.limit = limit
        self._metrics = metrics
        #: The TCP transports of all connections.
        self._open: dict[ClientConnection, asyncio.Transport] = {}
        #: Deadlines of the connections that wait for a request. The longest wait is the first.
        self._waiting: dict[ClientConnection, float] = {}
        self._is_sweeping = False
        self._next_warning = 0.0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, connection: ClientConnection, transport: asyncio.Transport) -> bool:
        """Count a new connection. At the limit, close another connection or the new one.

        Returns:
            False if the new connection was closed.
        """
        loop = asyncio.get_running_loop()
        if len(self._open) >= self.limit:
            self._warn(loop.time())
            longest = next(iter(self._waiting), None)
            if longest is None:
                self._metrics.closed_connections.labels("refused").inc()
                transport.abort()
                return False
            self._close(longest, "evicted")
        self._open[connection] = transport
        self._waiting[connection] = loop.time() + HEAD_TIMEOUT_S
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(SWEEP_S, self._sweep)
        return True

    def on_bytes(self, connection: ClientConnection) -> None:
        """Limit the time for the head of a request, which has begun to arrive on a connection."""
        if connection in self._waiting:
            latest = asyncio.get_running_loop().time() + HEAD_TIMEOUT_S
            self._waiting[connection] = min(self._waiting[connection], latest)

    def on_request(self, connection: ClientConnection) -> None:
        """Stop counting a connection as waiting, because the head of a request is complete."""
        self._waiting.pop(connection, None)

    def on_response(self, connection: ClientConnection, timeout_s: float) -> None:
        """Set the deadline for the client to read its response, or to send its next request.

        Args:
            timeout_s: seconds from now to the deadline.
        """
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = asyncio.get_running_loop().time() + timeout_s

    def on_large_head(self, connection: ClientConnection) -> None:
        """Close a connection because the heads of its requests are too large."""
        if connection in self._open:
            self._close(connection, "large_head")

    def remove(self, connection: ClientConnection) -> None:
        """Stop counting a connection that is closed."""
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)

    def _sweep(self) -> None:
        """Close the connections whose deadline has passed."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [each for each, deadline in self._waiting.items() if deadline < now]:
            self._close(connection, "timeout")
        self._is_sweeping = bool(self._open)
        if self._is_sweeping:
            loop.call_later(SWEEP_S, self._sweep)

    def _close(self, connection: ClientConnection, reason: str) -> None:
        self._waiting.pop(connection, None)
        self._open.pop(connection).abort()
        self._metrics.closed_connections.labels(reason).inc()

    def _warn(self, now: float) -> None:
        if now >= self._next_warning:
            self._next_warning = now + LOG_INTERVAL_S
            logger.warning(
                "the limit of %d connections is reached: closing the connection that has waited "
                "longest for a request, or the new connection if none waits; raise max_connections "
                "and the limits of file descriptors and memory, or run more gateways",
                self.limit,
            )


def response_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers that every response has."""
    # aiohttp's default for Server names the versions of Python and aiohttp.
    return {hdrs.SERVER: "baton", REQUEST_ID_HEADER: request_id(request)}


class ClientConnection(web.RequestHandler):
    """A client's connection, which is counted in `connections` and answers invalid HTTP.

    The response to malformed HTTP has OpenAI's shape, because the path is unknown. Other errors
    have the shape of the path's API. Neither response nor log quotes the request, which may contain
    an API key.
    """

    __slots__ = ("_connections", "_cors", "_head_bytes", "_payload")

    def __init__(self, manager: web.Server, connections: Connections, cors: CORS) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=KEEP_ALIVE_S,
            read_bufsize=READ_BUFFER_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._connections = connections
        self._cors = cors
        #: Bytes of heads since the last complete head.
        self._head_bytes = 0
        #: The body of the last request whose head is complete.
        self._payload = EMPTY_PAYLOAD

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(Any, transport).max_size = MAX_READ_BYTES
        if self._connections.add(self, cast(asyncio.Transport, transport)):
            super().connection_made(transport)

    def upgraded_to_tls(self, transport: asyncio.Transport) -> None:
        """Serve the TLS connection `transport`. Its TCP connection is already counted."""
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)  # cancels the handler: see `Gateway._listen`

    def data_received(self, data: bytes) -> None:
        self._connections.on_bytes(self)
        num_queued, payload = len(self._messages), self._payload
        num_body_bytes = -_num_bytes(payload)
        super().data_received(data)
        num_body_bytes += _num_bytes(payload)
        if len(self._messages) > num_queued:
            self._head_bytes = 0
            self._payload = self._messages[-1][1]
            num_body_bytes += _num_bytes(self._payload)
            if len(self._messages) > 1 or self._waiter is None:  # a request waits for another one
                self._pause_reading_for_buffer()
        if self._payload.is_eof():
            self._head_bytes += max(0, len(data) - num_body_bytes)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._connections.on_large_head(self)

    def _resume_reading_if_drained(self) -> None:
        # aiohttp would resume while 16 requests wait, whose heads and bodies can have megabytes.
        if not self._messages:
            super()._resume_reading_if_drained()

    def request_received(self, *, is_compressed: bool) -> None:
        """Record that the head of a request is complete.

        After the response to a request, aiohttp reads and decompresses the rest of the request's
        body. For a compressed body, which may expand to gigabytes, this method prevents that.
        """
        self._lingering_time = 0.0 if is_compressed else LINGER_S
        self._connections.on_request(self)

    def end_request(self) -> None:
        """Treat the current request as ended: count the connection as waiting for a request.

        A new connection may then evict this connection, even if the response is still due.
        """
        self._connections.on_response(self, WRITE_TIMEOUT_S)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._connections.on_response(self, WRITE_TIMEOUT_S)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._connections.on_response(self, KEEP_ALIVE_S)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log a failure of this connection, without a traceback if the request's body is invalid.

        aiohttp reads the rest of an invalid body after the response, and logs the failure again.
        With tracebacks, any client could fill the log.
        """
        if isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            logger.info("the rest of an invalid request body was discarded after the response")
        else:
            super().log_exception(*args, **kwargs)

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
        if status >= 500:
            logger.error(
                "[%s] a request from %s failed in the gateway, and the client gets status 500",
                name,
                request.remote,
                exc_info=exc,
            )
            error = gateway_failure(name)
        else:
            problem = type(exc).__name__
            logger.info("[%s] %s sent no valid HTTP request: %s", name, request.remote, problem)
            message = f"This is not a valid HTTP request: {problem}."
            error = APIError(status, message, code="invalid_http")
        response = web.Response(
            status=error.status,
            body=msgspec.json.encode(error_body(request.path, error)),
            content_type="application/json",
            headers=response_headers(request) | self._cors.headers(request),
        )
        response.force_close()
        return response


def allow_eviction(request: web.BaseRequest) -> None:
    """Allow a new connection to evict the connection of `request`, whose response is delayed."""
    assert isinstance(request.protocol, ClientConnection)
    request.protocol.end_request()


def _num_bytes(payload: StreamReader) -> int:
    """Return the number of bytes of a body that have arrived, counted before decompression."""
    return 0 if payload is EMPTY_PAYLOAD else payload.total_raw_bytes


# Each TLS connection has a buffer of this size from its handshake on.
asyncio.sslproto.SSLProtocol.max_size = MAX_READ_BYTES


class TLSHandshake(asyncio.Protocol):
    """Counts a new connection and runs its TLS handshake. `connection` takes over afterwards.

    asyncio's own TLS servers call `connection_made` only after the handshake. With them,
    connections in a handshake would not be counted.
    """

    def __init__(
        self, connection: ClientConnection, connections: Connections, context: ssl.SSLContext
    ) -> None:
        self._connection = connection
        self._connections = connections
        self._context = context
        #: Bytes that arrive together with the end of the handshake.
        self._received = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast(asyncio.Transport, transport)
        if self._connections.add(self._connection, tcp):
            self._task = asyncio.get_running_loop().create_task(self._upgrade(tcp))

    def data_received(self, data: bytes) -> None:
        self._received += data

    async def _upgrade(self, tcp: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            tls = await loop.start_tls(
                tcp,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HEAD_TIMEOUT_S,
            )
        except OSError:
            tls = None
        if tls is None or tls.is_closing():
            self._connections.remove(self._connection)
            tcp.abort()
            return
        tls.set_protocol(self._connection)
        self._connection.upgraded_to_tls(tls)
        if self._received:
            self._connection.data_received(bytes(self._received))


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors to the highest value that the process may set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # the kernel may allow less than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bounded_by_resources(num_connections: int, share: int) -> int:
    """Return `num_connections`, or fewer if the process's resources do not suffice.

    The connections may use at most 1 / `share` of the limit of file descriptors, and 1 / `share` of
    the container's memory limit.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [num_connections]
    if descriptors != resource.RLIM_INFINITY:
        limits.append(descriptors // share)
    if (memory := memory_limit()) is not None:
        limits.append(memory // CONNECTION_BYTES // share)
    return min(limits)


def connection_limit(max_connections: int, max_concurrent_requests: int) -> int:
    """Return the maximum number of clients' connections.

    The result is `max_connections`, or fewer if so many connections would need more than half of
    the process's limit on file descriptors or on memory.
    """
    limit = bounded_by_resources(max_connections, 2)
    if limit < max_connections:
        memory = memory_limit()
        logger.info(
            "max_connections is %d, but the limits on file descriptors (ulimit -Hn: %d) and on "
            "memory (%s) allow %d connections at once",
            max_connections,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "none" if memory is None else f"{memory} bytes",
            limit,
        )
    if limit < max_concurrent_requests:
        logger.warning(
            "max_concurrent_requests is %d, but at most %d connections are open at once: raise "
            "max_connections, the limit of file descriptors (ulimit -Hn) and the memory limit",
            max_concurrent_requests,
            limit,
        )
    return limit
