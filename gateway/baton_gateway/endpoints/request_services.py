"""The parts of a gateway that all endpoints use, from the body of a request to the engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiohttp import web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import CLIENT
from baton_gateway.access.scale_from_zero_queue import ScaleFromZeroQueue
from baton_gateway.endpoints.request_reader import RequestReader
from baton_gateway.http.body_budget import BodyBudget
from baton_gateway.http.slow_clients import send_json
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool
from baton_protocol.options.config import GatewayConfig


@dataclass(frozen=True)
class RequestServices:
    """The shared parts of the endpoints of one gateway.

    Args:
        config: limits and timeouts.
        served_name: name of the served model.
        metrics: the gateway's metrics.
        pool: the engines.
        admission: limits the sequences in flight.
        queue: holds requests while the service has no engine.
        bodies: limits the bytes of bodies and of responses.
        reader: reads and checks bodies.
    """

    config: GatewayConfig
    served_name: str
    metrics: GatewayMetrics
    pool: EnginePool
    admission: Admission
    queue: ScaleFromZeroQueue
    bodies: BodyBudget
    reader: RequestReader

    @classmethod
    def create(
        cls, config: GatewayConfig, metrics: GatewayMetrics, pool: EnginePool
    ) -> RequestServices:
        """Return the services of a gateway with this configuration."""
        name = served_name(config)
        timeout_s = min(config.request_timeout_s or math.inf, config.client_timeout_s)
        return cls(
            config,
            name,
            metrics,
            pool,
            Admission(
                config.max_concurrent_requests,
                metrics,
                client_limit=config.access.max_concurrent_per_client,
            ),
            ScaleFromZeroQueue(
                pool,
                metrics,
                hold_s=config.hold_s,
                queue_wait_s=config.queue_wait_s,
                limit=config.max_held_requests,
            ),
            # Rounded up, so that the limit of one API key is at least one body.
            BodyBudget(metrics, client_limit=-(-config.max_concurrent_requests // 4)),
            RequestReader(pool, metrics, served_name=name, timeout_s=timeout_s),
        )

    async def send(
        self, http: web.Request, body: bytes, left_s: float = math.inf
    ) -> web.StreamResponse:
        """Return the response with the JSON `body`.

        A large response counts in the budget `bodies` until the client has read it.

        Args:
            http: the request.
            body: the body of the response.
            left_s: time in seconds until the request's deadline.
        """
        timeout_s = min(left_s, self.config.client_timeout_s)
        async with self.bodies.charge(http.get(CLIENT)) as charge:
            return await send_json(http, body, timeout_s, charge)


def served_name(config: GatewayConfig) -> str:
    """Return the model name that clients use: the configured one, or the name of the folder."""
    return config.model.served_name or config.model.path.rstrip("/").rsplit("/", 1)[-1]
