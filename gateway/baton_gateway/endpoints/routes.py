"""The URL table and the middleware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from baton_gateway.access.api_keys import CLIENT, OPEN_PATHS, ApiKeys, client_name
from baton_gateway.access.graceful_shutdown import GracefulShutdown
from baton_gateway.access.refusals import Refusals
from baton_gateway.endpoints.generation_endpoint import (
    CLIENT_CLOSED_REQUEST,
    FINAL_STATUS,
    GenerationEndpoint,
)
from baton_gateway.endpoints.openapi.document import OpenAPIEndpoint
from baton_gateway.endpoints.pooling_endpoints import PoolingEndpoints
from baton_gateway.endpoints.status_endpoints import StatusEndpoints
from baton_gateway.endpoints.stored_responses import StoredResponses
from baton_gateway.endpoints.tokenize_endpoints import TokenizeEndpoints
from baton_gateway.errors import (
    MESSAGES_PATH,
    RESPONSES_PATH,
    APIError,
    bad_request,
    error_body,
    gateway_failure,
)
from baton_gateway.http.connections import response_headers, wait_for_client
from baton_gateway.http.cors import CORS
from baton_gateway.http.request_id import log_request_id, request_id
from baton_gateway.metrics import GatewayMetrics
from baton_text.errors import RequestError

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    """The HTTP applications of one gateway: one for clients, and one for the cluster.

    Args:
        generation: the endpoints that generate text.
        keys: authenticates clients; None: clients need no API key.
    """

    def __init__(
        self,
        generation: Iterable[GenerationEndpoint[Any]],
        stored: StoredResponses,
        pooling: PoolingEndpoints,
        tokenization: TokenizeEndpoints,
        status: StatusEndpoints,
        openapi: OpenAPIEndpoint,
        *,
        metrics: GatewayMetrics,
        shutdown: GracefulShutdown,
        keys: ApiKeys | None,
        cors: CORS,
    ) -> None:
        self._metrics = metrics
        self._shutdown = shutdown
        self._keys = keys
        self._refusals = Refusals()
        #: Serves clients.
        self.app = web.Application(
            middlewares=[log_request_id, cors.middleware, self._respond, self._authenticate]
        )
        self.app.on_response_prepare.extend(
            [_set_headers, cors.set_headers, shutdown.close_connection]
        )
        for endpoint in generation:
            self.app.router.add_post(endpoint.path, endpoint.handle)
        self.app.router.add_post("/v1/embeddings", pooling.embed)
        self.app.router.add_post("/v1/score", pooling.score)
        self.app.router.add_post("/v1/rerank", pooling.rerank)
        self.app.router.add_get(f"{RESPONSES_PATH}/{{response}}", stored.get)
        self.app.router.add_delete(f"{RESPONSES_PATH}/{{response}}", stored.delete)
        self.app.router.add_post(f"{MESSAGES_PATH}/count_tokens", tokenization.count_tokens)
        self.app.router.add_post("/tokenize", tokenization.tokenize)
        self.app.router.add_post("/detokenize", tokenization.detokenize)
        self.app.router.add_get("/v1/models", status.get_models)
        self.app.router.add_get("/v1/models/{model:.+}", status.get_model)
        self.app.router.add_get("/", status.get_root)
        self.app.router.add_get("/health", status.get_health)
        self.app.router.add_get("/ready", status.get_ready)
        self.app.router.add_get("/version", status.get_version)
        self.app.router.add_get("/openapi.json", openapi.get)
        #: Serves the kubelet, Prometheus and the operator, on a port of its own and without keys.
        self.metrics_app = web.Application(middlewares=[log_request_id, self._respond])
        self.metrics_app.on_response_prepare.append(_set_headers)
        self.metrics_app.router.add_get("/health", status.get_health)
        self.metrics_app.router.add_get("/ready", status.get_ready)
        self.metrics_app.router.add_get("/metrics", status.get_metrics)

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Require an API key, except for the probes of load balancers."""
        if self._keys is not None and request.path not in OPEN_PATHS:
            try:
                request[CLIENT] = self._keys.client_of(
                    request.headers.getall("Authorization", []),
                    request.headers.getall("X-Api-Key", []),
                )
            except APIError:
                if delay_s := self._refusals.record(request.remote):
                    wait_for_client(request)
                    await asyncio.sleep(delay_s)
                raise
        self._shutdown.on_request(request.path)  # a client without a key must not prolong it
        return await handler(request)

    @web.middleware
    async def _respond(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Count every request, and turn failures into error bodies."""
        status = CLIENT_CLOSED_REQUEST
        try:
            try:
                response = await handler(request)
            except RequestError as error:
                response = _error_response(request, bad_request(error))
            except APIError as error:
                response = _error_response(request, error)
            except web.HTTPException as error:
                response = _error_response(request, _http_error(request, error), error)
            except RecursionError:  # of a body that is nested as deep as its parser allows
                too_deep = RequestError("The body is nested too deeply", code="invalid_json")
                response = _error_response(request, bad_request(too_deep))
            except Exception:
                logger.exception(
                    "%s %s%s failed", request.method, request.path, client_name(request)
                )
                response = _error_response(request, gateway_failure(request_id(request)))
            status = request.get(FINAL_STATUS, response.status)
            return response
        finally:
            resource = request.match_info.route.resource
            endpoint = "unknown" if resource is None else resource.canonical
            self._metrics.requests.labels(endpoint, str(status)).inc()
            if CLIENT in request:
                self._metrics.client_requests.labels(request[CLIENT], str(status)).inc()


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(response_headers(request))


def _error_response(
    http: web.Request, error: APIError, http_error: web.HTTPException | None = None
) -> web.Response:
    headers = dict(error.headers)
    if http_error is not None and "Allow" in http_error.headers:
        headers["Allow"] = http_error.headers["Allow"]
    body = msgspec.json.encode(error_body(http.path, error))
    return web.Response(
        status=error.status, body=body, content_type="application/json", headers=headers
    )


def _http_error(http: web.Request, error: web.HTTPException) -> APIError:
    """Convert an error that aiohttp raised, for example for an unknown URL, to an APIError."""
    if error.status == 404:
        return APIError(
            404, f"Unknown URL {http.method} {http.path}; see GET /v1/models.", code="unknown_url"
        )
    if error.status == 405:
        return APIError(
            405, f"{http.path} does not support {http.method}.", code="method_not_allowed"
        )
    return APIError(error.status, error.reason)
