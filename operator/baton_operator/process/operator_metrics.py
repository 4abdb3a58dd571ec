"""The operator's metrics, and the HTTP server for /metrics and /health."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Metrics:
    """Metrics of one operator process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.reconciles = Counter(
            "baton_operator_reconciles", "Reconciles by result", ["result"], registry=registry
        )
        self.seconds = Histogram(
            "baton_operator_reconcile_seconds",
            "Duration of one reconcile",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.requests = Counter(
            "baton_operator_api_requests",
            "Requests to the API server; code 0: no answer",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.retries = Counter(
            "baton_operator_retries", "Reconciles that failed and are retried", registry=registry
        )
        self.services = Gauge(
            "baton_operator_services", "LLMServices that the operator reconciles", registry=registry
        )
        self.queue = Gauge(
            "baton_operator_queue_depth", "Services that wait to be reconciled", registry=registry
        )
        self.scrapes = Counter(
            "baton_operator_scrapes",
            "Scrapes of pods for the autoscaler by result",
            ["result"],
            registry=registry,
        )
        self.leader = Gauge(
            "baton_operator_leader", "1 if this process reconciles", registry=registry
        )


#: Maximum number of connections to /health and /metrics, which any pod may open. A further
#: connection closes the oldest one.
MAX_CONNECTIONS = 128
#: Connections that are accepted in one turn of the event loop. A request takes about three turns.
#: A burst opens fewer than MAX_CONNECTIONS connections in these turns, so it does not close the
#: connection of the request.
ACCEPTED_PER_TURN = MAX_CONNECTIONS // 8
#: Connections that the kernel keeps until they are accepted.
BACKLOG = 512
#: Seconds for which the text of /metrics is reused.
MAX_AGE_S = 0.1
#: Limits of a connection, in seconds, headers and bytes. Bodies are neither read nor decompressed.
LIMITS: dict[str, Any] = {
    "lingering_time": 0.0,
    "max_headers": 16,
    "max_line_size": 1024,
    "max_field_size": 4096,
    "read_bufsize": 2**12,
    "auto_decompress": False,
}


class _Connection(web.RequestHandler):
    """A connection for one request.

    Nothing is read after the head of the request. So a client that sends many requests and reads
    no response cannot fill the memory.
    """

    __slots__ = ("_opened",)

    def __init__(self, manager: web.Server, opened: dict[_Connection, asyncio.Transport]) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(manager, loop=loop, access_log=None, **LIMITS)  # type: ignore[arg-type]
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(Any, transport).max_size = LIMITS["read_bufsize"]  # bytes of one read
        self._opened[self] = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        if len(self._opened) > MAX_CONNECTIONS:
            # `close` would wait until the client has read the response.
            self._opened.pop(next(iter(self._opened))).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._opened.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and self.transport is not None:
            self.transport.pause_reading()


def _last(response: web.Response) -> web.Response:
    """Return `response`, marked as the last one before the server closes the connection."""
    response.force_close()
    return response


class AddressError(Exception):
    """The operator cannot listen on the configured address for /health and /metrics."""


@asynccontextmanager
async def serve(
    host: str, port: int, metrics: Metrics, explain_stuck: Callable[[], str]
) -> AsyncIterator[int]:
    """Serve /health and /metrics while the context is open. Yield the port.

    Args:
        port: 0 selects a free port.
        explain_stuck: returns why the process must be restarted; empty if no restart is needed.
            With a reason, /health returns 503.

    Raises:
        AddressError: the address is in use, or does not belong to this machine.
    """

    async def health(_: web.Request) -> web.Response:
        why = explain_stuck()
        return _last(web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n"))

    text, made_at = b"", -math.inf

    async def expose(_: web.Request) -> web.Response:
        nonlocal text, made_at
        if time.monotonic() - made_at > MAX_AGE_S:
            text, made_at = generate_latest(metrics.registry), time.monotonic()
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return _last(web.Response(body=text, headers=headers))

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", expose)])
    runner = web.AppRunner(app)
    await runner.setup()
    manager = runner.server
    assert manager is not None
    opened: dict[_Connection, asyncio.Transport] = {}

    try:
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(manager, opened), host, port, backlog=ACCEPTED_PER_TURN
            )
            for each in server.sockets:
                with each.dup() as listener:
                    listener.listen(BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise AddressError(f"cannot listen on {host}:{port}: {why}") from error
        async with server:
            yield int(server.sockets[0].getsockname()[1])
    finally:
        await runner.cleanup()
