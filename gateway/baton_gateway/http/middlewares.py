"""The middlewares that count requests, convert errors to responses, and authenticate clients.

`components.py` chooses the middlewares of each port, and their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from baton_gateway.access.api_keys import CLIENT, OPEN_PATHS, ApiKeys, client_name
from baton_gateway.access.auth_delays import AuthDelays
from baton_gateway.access.graceful_shutdown import GracefulShutdown
from baton_gateway.errors import APIError, bad_request, error_body, gateway_failure
from baton_gateway.http.connections import allow_eviction, response_headers
from baton_gateway.http.request_id import request_id
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.thread_pool import current_client
from baton_text.request_error import RequestError

logger = logging.getLogger(__name__)

#: nginx's status for a client that disconnected. Metrics count it, but it is never sent.
CLIENT_CLOSED_REQUEST = 499
#: Status that metrics count for a stream that began with 200 and failed later.
FINAL_STATUS = web.RequestKey("final_status", int)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestCounter:
    """Counts requests by endpoint, client and status."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Call `handler`, and then count the request with its final status.

        If the handler was cancelled, for example because the client disconnected, the status is
        499 (CLIENT_CLOSED_REQUEST).
        """
        status = CLIENT_CLOSED_REQUEST
        try:
            response = await handler(request)
            status = request.get(FINAL_STATUS, response.status)
            return response
        finally:
            resource = request.match_info.route.resource
            endpoint = "unknown" if resource is None else resource.canonical
            self._metrics.requests.labels(endpoint, str(status)).inc()
            if CLIENT in request:
                self._metrics.client_requests.labels(request[CLIENT], str(status)).inc()


@web.middleware
async def convert_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Call `handler`, and convert its exceptions to responses with the error body of the API."""
    try:
        return await handler(request)
    except RequestError as error:
        return _error_response(request, bad_request(error))
    except APIError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        return _error_response(request, _http_error(request, error), error)
    except RecursionError:  # the parser allows deeper nesting than later steps
        too_deep = RequestError("The body is nested too deeply", code="invalid_json")
        return _error_response(request, bad_request(too_deep))
    except Exception:
        logger.exception(
            "%s %s%s failed in the gateway, and the client gets status 500",
            request.method,
            request.path,
            client_name(request),
        )
        return _error_response(request, gateway_failure(request_id(request)))


class Authentication:
    """Requires an API key for each request, except for the health checks of load balancers.

    Args:
        keys: authenticates clients; None if clients need no API key.
        shutdown: receives the path of each accepted request. A graceful shutdown first waits until
            no more requests arrive.
    """

    def __init__(self, keys: ApiKeys | None, shutdown: GracefulShutdown) -> None:
        self._keys = keys
        self._shutdown = shutdown
        self._auth_delays = AuthDelays()

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Authenticate the client, and call `handler`.

        Raises:
            APIError: 401, the request has no valid API key.
        """
        if self._keys is not None and request.path not in OPEN_PATHS:
            try:
                request[CLIENT] = self._keys.client_of(
                    request.headers.getall("Authorization", []),
                    request.headers.getall("X-Api-Key", []),
                )
                current_client.set(request[CLIENT])
            except APIError:
                if delay_s := self._auth_delays.record(request.remote):
                    allow_eviction(request)
                    await asyncio.sleep(delay_s)
                raise
        self._shutdown.on_request(request.path)  # a client without a key must not delay it
        return await handler(request)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the common headers to `response`. aiohttp calls this function before it sends headers."""
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
