"""The watches against a small server that speaks just enough of the API: they go on after what kopf takes for the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from baton_operator import watch as watching
from baton_operator.workqueue import Key

DEADLINE_S = 30.0
GROUPS = {
    "v1": ["pods", "services", "configmaps", "events", "namespaces"],
    "apps/v1": ["deployments"],
    "networking.k8s.io/v1": ["ingresses"],
    "serving.baton.dev/v1alpha1": ["llmservices"],
}


class Api:
    """Every list of LLMServices holds `demo`; every watch of them ends as `broken` says."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self.lists = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/apis/").removeprefix("/api/").rstrip("/")
        if request.path.rstrip("/") == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path.rstrip("/") == "/apis":
            return web.json_response({"groups": [self._group(name) for name in GROUPS if "/" in name]})
        if path in GROUPS:
            verbs = ["get", "list", "watch"]
            names = [
                {"name": n, "singularName": n[:-1], "kind": n[:-1], "namespaced": n != "namespaces", "verbs": verbs}
                for n in GROUPS[path]
            ]
            return web.json_response({"groupVersion": path, "resources": names})
        ours = path.endswith("llmservices")
        if "watch" in request.query:
            return await self._watch(request, ours)
        self.lists += ours
        items = [{"metadata": {"name": "demo", "namespace": "default", "uid": "1"}}] if ours else []
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})

    def _group(self, name: str) -> dict[str, object]:
        version = {"groupVersion": name, "version": name.split("/")[1]}
        return {"name": name.split("/")[0], "versions": [version], "preferredVersion": version}

    async def _watch(self, request: web.Request, ours: bool) -> web.StreamResponse:
        if ours and self.broken == "unauthorized":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        response = web.StreamResponse()
        await response.prepare(request)
        while not (ours and self.broken):
            await asyncio.sleep(0.05)
        await response.write(b'{"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}}\n')
        return response


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, client.Configuration]]:
    api, app = Api(), web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api, configuration
    await runner.cleanup()


@pytest.mark.parametrize("broken", ["error", "unauthorized"])
async def test_watches_that_end_by_themselves_are_started_again(
    api: tuple[Api, client.Configuration], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RESTART_S", 0.1)
    monkeypatch.setattr(watching, "END_TIMEOUT_S", 1.0)
    server, configuration = api
    keys: list[tuple[Key, int]] = []
    stop = asyncio.Event()
    running = asyncio.create_task(
        watching.watch(
            lambda key: keys.append((key, threading.get_ident())),
            configuration=configuration,
            in_cluster=False,
            namespaces=[],
            stop=stop,
        )
    )

    async def wait_for(keys_seen: int, lists: int) -> None:
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while len(keys) < keys_seen or server.lists < lists:
            assert not running.done(), running.exception()
            assert asyncio.get_running_loop().time() < deadline, f"{len(keys)} keys, {server.lists} lists"
            await asyncio.sleep(0.02)

    await wait_for(1, 1)
    assert keys[0] == (Key("default", "demo"), threading.get_ident()), "added on the thread of the queue's loop"
    server.broken = broken
    await wait_for(1, 2)
    server.broken = None
    await wait_for(2, 2)
    stop.set()
    await asyncio.wait_for(running, DEADLINE_S)
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while left := [thread for thread in threading.enumerate() if thread.name == "kopf"]:
        assert asyncio.get_running_loop().time() < deadline, f"{len(left)} threads of kopf do not end"
        await asyncio.sleep(0.05)
