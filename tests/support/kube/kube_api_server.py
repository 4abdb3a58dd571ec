"""A minimal API server. Tests script its replies and read its requests.

For the tests of `baton_kube`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from baton_kube.client import KubeClient, Object
from support import http_server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PODS = "/api/v1/namespaces/ns/pods"
DEADLINE_S = 60.0


@dataclass
class ReceivedRequest:
    """One received request."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str
    accept: str
    token: str
    body: Object | None


@dataclass
class ApiServer:
    """An API server that records requests. Tests set `handler`, which replies to them."""

    handler: Handler = None
    asked: list[ReceivedRequest] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        header = request.headers.get
        self.asked.append(
            ReceivedRequest(
                request.method,
                request.path,
                dict(request.query),
                request.content_type,
                header("Accept", ""),
                header("Authorization", ""),
                json.loads(text) if text else None,
            )
        )
        return await self.handler(request)


@asynccontextmanager
async def serving(server: Any) -> AsyncIterator[KubeClient]:
    """Serve requests with the method `handle` of `server`, and yield a client."""
    async with http_server.serving(web.route("*", "/{path:.*}", server.handle)) as port:
        configuration = Configuration(host=f"http://127.0.0.1:{port}")
        configuration.connection_pool_maxsize = 0
        async with ApiClient(configuration) as api:
            yield KubeClient(api)


async def streamed(
    request: web.Request, *chunks: str, cut: bool = False, hang: bool = False
) -> web.StreamResponse:
    """Send `chunks`, then end the response.

    Args:
        cut: abort the connection instead of ending the response.
        hang: keep the response open without sending anything more.
    """
    response = web.StreamResponse()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk.encode())
    if hang:
        await asyncio.Event().wait()
    if cut:
        await asyncio.sleep(0.05)  # the chunks must arrive before the connection is reset
        request.transport.abort()
    return response


def event(kind: str, obj: Object) -> str:
    return json.dumps({"type": kind, "object": obj}) + "\n"


def pod(name: str, version: int) -> Object:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version)}
    }
