"""The parts of a gateway that all endpoints use, from the body of a request to the engines."""

from __future__ import annotations

import math
from typing import TypeVar

from aiohttp import web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import CLIENT
from baton_gateway.access.scale_from_zero_queue import ScaleFromZeroQueue
from baton_gateway.errors import APIError, check_model
from baton_gateway.http.body_budget import BodyBudget, BodyCharge
from baton_gateway.http.request_body import UnknownFields, parse_body
from baton_gateway.http.slow_clients import send_json
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool
from baton_protocol.options.config import GatewayConfig
from baton_text.requests.parsing import Checked

_Body = TypeVar("_Body", bound=Checked)


class RequestServices:
    """The objects that all endpoints of one gateway share.

    Args:
        config: limits and timeouts.
        metrics: the gateway's metrics.
        pool: the engines.
    """

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, pool: EnginePool) -> None:
        self.config = config
        self.metrics = metrics
        self.pool = pool
        #: Name of the served model.
        self.served_name = served_name(config)
        #: Limits the sequences in flight.
        self.admission = Admission(
            config.max_concurrent_requests,
            metrics,
            client_limit=config.access.max_concurrent_per_client,
        )
        #: Holds requests while the service has no engine.
        self.queue = ScaleFromZeroQueue(
            pool,
            metrics,
            hold_s=config.hold_s,
            queue_wait_s=config.queue_wait_s,
            limit=config.max_held_requests,
        )
        #: Limits the bytes of bodies and of responses. The limit of one API key is rounded up, so
        #: that it is at least one body.
        self.bodies = BodyBudget(metrics, client_limit=-(-config.max_concurrent_requests // 4))
        self._unknown_fields = UnknownFields(metrics)

    async def read(
        self, http: web.Request, charge: BodyCharge, kind: type[_Body]
    ) -> tuple[_Body, int]:
        """Return the parsed body, and its number of bytes.

        Raises:
            APIError, RequestError: the content type is not JSON, `charge.read` failed, or the body
                is invalid or names another model.
        """
        if http.content_type != "application/json":
            message = f"Content-Type must be application/json, got {http.content_type!r}."
            raise APIError(415, message, code="unsupported_media_type")
        timeout_s = min(self.config.request_timeout_s or math.inf, self.config.client_timeout_s)
        content = await charge.read(http, timeout_s)
        max_model_len = self.pool.max_model_len
        body = await parse_body(content, kind, max_model_len, self._unknown_fields, charge)
        check_model(body.model, self.served_name)
        return body, len(content)

    async def send(
        self, http: web.Request, body: bytes, left_s: float = math.inf
    ) -> web.StreamResponse:
        """Return the response with the JSON `body`. Send the response first if it is large.

        A small response is sent by aiohttp when the handler has returned it. A large response
        counts in the budget `bodies` until the client has read it.

        Args:
            http: the request.
            body: the body of the response.
            left_s: time in seconds until the request's deadline.
        """
        timeout_s = min(left_s, self.config.client_timeout_s)
        async with self.bodies.charge(http.get(CLIENT)) as charge:
            return await send_json(http, body, timeout_s, charge)


def served_name(config: GatewayConfig) -> str:
    """Return the model name that clients use: `served_name`, or the last part of `path`."""
    return config.model.served_name or config.model.path.rstrip("/").rsplit("/", 1)[-1]
