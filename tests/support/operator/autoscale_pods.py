"""Pods for tests of the autoscaler: Pod objects, and HTTP servers that serve their metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.prometheus import engine_registry
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_gateway.metrics import GatewayMetrics
from baton_operator.autoscale.scrape import Scraper
from baton_operator.names import LABEL_ROLE, MemberRole
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_METRICS_PORT
from support import http_server

_HOSTS = (f"127.91.{os.getpid() % 250}.{number}" for number in count(1))


class FakePod:
    """The Pod object and the metrics of one engine or gateway. `serving()` serves the metrics."""

    def __init__(self, name: str, role: MemberRole | None) -> None:
        self.name, self.role, self.host = name, role, next(_HOSTS)
        self.is_ready = True
        self.restarts = 0
        #: One of error, garbage, long or silent.
        self.fault = ""
        self.num_scrapes = 0
        #: Load of an engine.
        self.stats, self.requests = EngineStats(), RequestMetrics()
        self.gateway = GatewayMetrics()

    @property
    def object(self) -> dict[str, Any]:
        return {
            "metadata": {
                "name": self.name,
                "uid": f"uid-{self.name}",
                "labels": {LABEL_ROLE: self.role or "gateway"},
            },
            "status": {
                "phase": "Running",
                "podIP": self.host,
                "conditions": [{"type": "Ready", "status": "True" if self.is_ready else "False"}],
                "containerStatuses": [
                    {
                        "name": "engine",
                        "restartCount": self.restarts,
                        "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
                    }
                ],
            },
        }

    def serve_load(self, *, tokens: int, itl_s: float, running: int = 4) -> None:
        """Record `tokens` generated tokens with the inter-token latency `itl_s`."""
        self.requests.histograms["inter_token_latency_seconds"].observe(itl_s, tokens)
        self.stats.num_requests_running = running

    def answer(self, requests: int = 1) -> None:
        self.gateway.requests.labels("/v1/completions", "200").inc(requests)

    async def metrics(self, _: web.Request) -> web.Response:
        self.num_scrapes += 1
        if self.fault == "silent":
            await asyncio.sleep(30)
        if self.fault == "error":
            return web.Response(status=500, text="no")
        if self.fault == "garbage":
            return web.Response(text="<html>502 Bad Gateway</html>")
        if self.fault == "long":
            return web.Response(body=b"# a comment\n" * 2**16)
        registry = (
            engine_registry(lambda: self.stats, self.requests, "m")
            if self.role
            else self.gateway.registry
        )
        return web.Response(body=generate_latest(registry))


class Clock:
    """A clock that only tests advance, by setting `now`."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(*pods: FakePod) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for pod in pods:
            await stack.enter_async_context(
                http_server.serving(
                    web.get("/metrics", pod.metrics),
                    host=pod.host,
                    port=ENGINE_HTTP_PORT if pod.role else GATEWAY_METRICS_PORT,
                )
            )
        yield


@asynccontextmanager
async def scraper(**options: Any) -> AsyncIterator[tuple[Scraper, Counter]]:
    results = Counter("scrapes", "by result", ["result"], registry=CollectorRegistry())
    async with aiohttp.ClientSession() as session:
        yield Scraper(session, results, **options), results
