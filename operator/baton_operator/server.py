"""The operator's own HTTP: /health for the kubelet, /metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton_operator.workqueue import Key, Work


class Metrics:
    """Counts of one operator process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "baton_operator_reconciles", "Reconciles by result", ["result"], registry=self.registry
        )
        self._seconds = Histogram(
            "baton_operator_reconcile_seconds", "Duration of one reconcile", registry=self.registry
        )
        self.services = Gauge("baton_operator_services", "LLMServices at the last resync", registry=self.registry)
        self.queue = Gauge("baton_operator_queue_depth", "Keys that wait for a worker", registry=self.registry)

    def measured(self, work: Work) -> Work:
        """`work`, counted and timed."""

        async def timed(key: Key) -> float | None:
            start = time.monotonic()
            try:
                delay_s = await work(key)
            except Exception:
                self._reconciles.labels("error").inc()
                raise
            finally:
                self._seconds.observe(time.monotonic() - start)
            self._reconciles.labels("ok").inc()
            return delay_s

        return timed


class Liveness:
    """Whether the resync goes on: without one for `limit_s` the operator is stuck, and restarting it helps."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._last = time.monotonic()

    def beat(self) -> None:
        self._last = time.monotonic()

    @property
    def stale_s(self) -> float:
        return time.monotonic() - self._last


@asynccontextmanager
async def serve(host: str, port: int, metrics: Metrics, liveness: Liveness) -> AsyncIterator[int]:
    """Serves inside the context; yields the port, which is `port` unless that is 0. Raises OSError if it is taken."""

    async def health(_: web.Request) -> web.Response:
        if liveness.stale_s > liveness.limit_s:
            return web.Response(status=503, text=f"no resync for {liveness.stale_s:.0f} s\n")
        return web.Response(text="ok\n")

    async def expose(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {"/health": health, "/metrics": expose}
    app = web.Application()
    app.add_routes([web.get(path, handler) for path, handler in routes.items()])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
