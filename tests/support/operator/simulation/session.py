"""The HTTP session through which kopf watches the simulated API server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from yarl import URL

from baton_kube.client import KubeError
from pocketkube.apiserver.serving.selectors import label_selector

if TYPE_CHECKING:
    from support.operator.simulation.api_server import ApiServer


class SimulatedSession:
    """A fake aiohttp session with the methods that kopf uses.

    Args:
        middlewares: middlewares of an aiohttp client, the outermost first.
    """

    def __init__(self, server: ApiServer, middlewares: Sequence[Any]) -> None:
        self.headers: dict[str, str] = {}
        self.closed = False
        self._server = server
        self._middlewares = middlewares

    async def request(self, *, method: str, url: str, **_: Any) -> Response:
        async def send(request: Any) -> Response:
            assert request.method == "get", "kopf writes"
            return self._answer(request.url)

        handler: Any = send
        for middleware in reversed(self._middlewares):

            def wrapped(request: Any, middleware: Any = middleware, inner: Any = handler) -> Any:
                return middleware(request, inner)

            handler = wrapped
        response: Response = await handler(SimpleNamespace(method=method, url=URL(url), headers={}))
        return response

    def _answer(self, url: URL) -> Response:
        query = dict(url.query)
        parts = [part for part in url.path.split("/") if part]
        group = parts[1] if parts[0] == "apis" and len(parts) > 1 else ""
        wire = self._server.wire_of(f"{parts[-1]}.{group}".rstrip("."))
        if query.get("watch") == "true":
            matches = label_selector(query.get("labelSelector", ""))
            timeout_s = float(query["timeoutSeconds"])
            return Response(
                200, events=wire.watch(matches, int(query["resourceVersion"]), timeout_s=timeout_s)
            )
        match wire.lists:
            case "500":
                return Response(500, {"kind": "Status", "message": "etcdserver: request timed out"})
            case "429":
                return Response(
                    429, {"kind": "Status", "message": "later"}, headers={"Retry-After": "3"}
                )
            case "break":
                return Response(200)
        try:
            return Response(200, self._server.request("GET", url.path, None, query, ""))
        except KubeError as error:
            return Response(error.status, {"kind": "Status", "message": str(error)})

    async def close(self) -> None:
        self.closed = True


class Response:
    """The response to a list (with `body`) or to a watch (with `events`)."""

    def __init__(
        self,
        status: int,
        body: Any = None,
        events: AsyncGenerator[Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = headers or {}
        self.closed = False
        self.content = self
        self._body = body
        self._events = events

    async def json(self) -> Any:
        if self._body is None:
            raise aiohttp.ClientPayloadError("the connection broke")
        return self._body

    def raise_for_status(self) -> None:
        request_info: Any = SimpleNamespace(real_url="simulated")
        raise aiohttp.ClientResponseError(request_info, (), status=self.status)

    async def iter_chunked(self, size: int) -> AsyncGenerator[bytes]:
        assert self._events is not None
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    yield json.dumps(event).encode() + b"\n"
            except ConnectionError as error:
                raise aiohttp.ClientPayloadError(str(error)) from error

    def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
