"""The operator's metrics, and the HTTP server for /metrics and /health."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
        return web.Response(status=503, text=f"{why}\n") if why else web.Response(text="ok\n")

    async def expose(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=generate_latest(metrics.registry), headers=headers)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", expose)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise AddressError(f"cannot listen on {host}:{port}: {why}") from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
