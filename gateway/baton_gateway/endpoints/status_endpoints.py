"""The endpoints about the service and its model: models, health, readiness, metrics, version."""

from __future__ import annotations

import importlib.metadata
import time

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton_gateway.access.graceful_shutdown import GracefulShutdown
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.errors import check_model, unavailable
from baton_text.responses.openai import ModelCard, ModelList, Version


class StatusEndpoints:
    """The endpoints about the service and its model, on the clients' and the metrics port."""

    def __init__(self, services: RequestServices, shutdown: GracefulShutdown) -> None:
        self._services = services
        self._shutdown = shutdown
        self._created = int(time.time())
        self._has_been_ready = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.get_models),
            web.get("/v1/models/{model:.+}", self.get_model),
            web.get("/", self.get_root),
            web.get("/health", self.get_health),
            web.get("/ready", self.get_ready),
            web.get("/version", self.get_version),
        ]

    def metrics_routes(self) -> list[web.RouteDef]:
        """Return the routes for the kubelet, Prometheus and the operator. They need no API key."""
        return [
            web.get("/health", self.get_health),
            web.get("/ready", self.get_ready),
            web.get("/metrics", self.get_metrics),
        ]

    async def get_models(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=[self._model()]))

    async def get_model(self, http: web.Request) -> web.Response:
        check_model(http.match_info["model"], self._services.served_name)
        return _json(self._model())

    def _model(self) -> ModelCard:
        return ModelCard(
            id=self._services.served_name,
            created=self._created,
            max_model_len=self._services.pool.max_model_len,
        )

    async def get_root(self, _: web.Request) -> web.Response:
        """Answer the health checks of load balancers, which request `/` by default."""
        return web.Response(text="ok")

    async def get_health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def get_ready(self, _: web.Request) -> web.Response:
        """Return 200 if the gateway should receive requests, else 503.

        The status is 503 until a decode engine has been ready, and during shutdown. A service may
        run without engines if the scale-from-zero queue is enabled, or if the service is scaled to
        zero by hand. In both cases, the gateway returns 200 from the start.

        The status stays 200 when all engines are lost, so that the Service keeps this gateway as
        an endpoint. Clients then wait in the queue or get 503 with Retry-After. Without an
        endpoint, their connections would be refused.
        """
        pool, queue = self._services.pool, self._services.queue
        self._services.admission.check_open()
        if self._shutdown.has_begun:
            raise unavailable(
                "This gateway is shutting down; another one will answer.", code="draining"
            )
        may_lack_engines = queue.is_enabled or pool.is_scaled_to_zero
        self._has_been_ready |= pool.has_seen_decode or may_lack_engines
        if not self._has_been_ready:
            raise unavailable("No decode engine is ready yet.", code="no_ready_engine")
        return web.Response()

    async def get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._services.metrics.text.get(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def get_version(self, _: web.Request) -> web.Response:
        return _json(Version(version=importlib.metadata.version("baton")))


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
