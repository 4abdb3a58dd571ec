"""Reads the JSON bodies of requests."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web

from baton_gateway.errors import APIError, check_model
from baton_gateway.http.body_budget import BodyCharge
from baton_gateway.http.request_body import UnknownFields, parse_body
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool
from baton_text.requests.parsing import Checked

_Body = TypeVar("_Body", bound=Checked)


class RequestReader:
    """Reads and checks bodies.

    Args:
        served_name: the only model that a body may name.
        timeout_s: longest time for a client to send a body.
    """

    def __init__(
        self,
        pool: EnginePool,
        metrics: GatewayMetrics,
        *,
        served_name: str,
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._unknown_fields = UnknownFields(metrics)
        self._served_name = served_name
        self._timeout_s = timeout_s

    async def read(
        self, http: web.Request, charge: BodyCharge, kind: type[_Body]
    ) -> tuple[_Body, int]:
        """Return the parsed body, and its number of bytes.

        Raises:
            APIError, RequestError: the body is invalid or does not arrive in time, or names another
                model.
        """
        if http.content_type != "application/json":
            message = f"Content-Type must be application/json, got {http.content_type!r}."
            raise APIError(415, message, code="unsupported_media_type")
        content = await charge.read(http, self._timeout_s)
        body = await parse_body(
            content, kind, self._pool.max_model_len, self._unknown_fields, charge
        )
        check_model(body.model, self._served_name)
        return body, len(content)
