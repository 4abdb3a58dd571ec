"""Services, ingresses and pods for the proxies, and an application that streams.

For the tests of the proxies.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import web

from baton_kube.client import Object


def pod(name: str, ip: str, *, ready: bool = True, port: int = 8000, **metadata: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": {"app": "web"}, **metadata},
        "spec": {
            "containers": [{"name": "main", "ports": [{"name": "http", "containerPort": port}]}]
        },
        "status": {
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def service(address: str = "127.97.0.1", port: int = 80, **spec: Any) -> Object:
    ports = [{"name": "web", "port": port, "targetPort": "http"}]
    return {
        "metadata": {"name": "web", "namespace": "ns", "resourceVersion": "1"},
        "spec": {"clusterIP": address, "selector": {"app": "web"}, "ports": ports, **spec},
    }


def ingress(*paths: tuple[str, str, str], host: str = "web.test") -> Object:
    entries = [
        {
            "path": path,
            "pathType": kind,
            "backend": {"service": {"name": name, "port": {"name": "web"}}},
        }
        for path, kind, name in paths
    ]
    return {
        "metadata": {"name": "i", "namespace": "ns"},
        "spec": {"rules": [{"host": host, "http": {"paths": entries}}]},
    }


class Cache:
    """The part of a Reflector that the proxies use, with fixed objects."""

    def __init__(self, *objects: Object) -> None:
        self.objects = {
            f"{obj['metadata']['namespace']}/{obj['metadata']['name']}": obj for obj in objects
        }
        self.synced = asyncio.Event()
        self.synced.set()
        self._listeners: list[Callable[[Object | None, Object | None], None]] = []

    def subscribe(self, listener: Callable[[Object | None, Object | None], None]) -> None:
        self._listeners.append(listener)

    def remove(self, key: str) -> None:
        gone = self.objects.pop(key)
        for listener in self._listeners:
            listener(gone, None)


class Events:
    """Collects the reasons of recorded events."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record(self, obj: Object, kind: str, reason: str, message: str, **more: str) -> None:
        self.reasons.append(reason)


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def streaming_app(more: asyncio.Event, ended: asyncio.Event) -> web.Application:
    """Return an app that sends a chunk, and another one after `more`.

    It sets `ended` when the handler ends.
    """

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(await request.read() + b"one\n\n")
            await more.wait()
            await response.write(request.headers.get("X-Forwarded-Host", "none").encode())
        finally:
            ended.set()
        return response

    app = web.Application()
    app.router.add_route("*", "/stream", stream)
    return app
