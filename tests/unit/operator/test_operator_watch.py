"""The watches against a small server that speaks just enough of the API, and breaks as the tests say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from baton_operator import watch as watching
from baton_operator.cached_kube import CachedKube
from baton_operator.names import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGER
from baton_operator.watch import Watches
from baton_operator.workqueue import Key

Object = dict[str, Any]
DEADLINE_S = 60.0
DEMO = Key("default", "demo")


def pod(name: str, version: int) -> Object:
    labels = {LABEL_SERVICE: "demo", LABEL_MANAGED_BY: MANAGER}
    metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": metadata}


class Api:
    """Pods, and how their watches end. All other kinds are empty and quiet."""

    def __init__(self) -> None:
        self.version = 1
        self.pods: dict[str, Object] = {}
        self.log: list[tuple[int, str, Object]] = []
        self.lists = 0
        self.watches: list[int] = []
        """The version that each asked for."""
        self.refuse: int | None = None
        self.forgotten = 0
        """Watches from a version below this end with 410."""
        self.cut = asyncio.Event()

    def put(self, name: str) -> None:
        self.version += 1
        self.pods[name] = pod(name, self.version)
        self.log.append((self.version, "ADDED", self.pods[name]))

    def delete(self, name: str, *, tell: bool = True) -> None:
        self.version += 1
        gone = pod(name, self.version)
        del self.pods[name]
        if tell:
            self.log.append((self.version, "DELETED", gone))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_pods = request.path.endswith("/pods")
        if "watch" in request.query:
            return await self._watch(request, is_pods)
        if is_pods:
            self.lists += 1
        if is_pods and self.refuse:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        items = list(self.pods.values()) if is_pods else []
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, is_pods: bool) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if is_pods:
            assert request.query["labelSelector"] == f"{LABEL_MANAGED_BY}={MANAGER}"
            self.watches.append(since)
        if is_pods and self.refuse:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        response = web.StreamResponse()
        await response.prepare(request)
        if is_pods and since < self.forgotten:
            await self._send(response, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
            return response
        cut = self.cut
        while not (is_pods and cut.is_set()):
            for version, type_, obj in self.log if is_pods else []:
                if version > since:
                    await self._send(response, type_, obj)
                    since = version
            await asyncio.sleep(0.01)
        assert request.transport
        request.transport.abort()
        return response

    async def _send(self, response: web.StreamResponse, type_: str, obj: Object) -> None:
        await response.write(json.dumps({"type": type_, "object": obj}).encode() + b"\n")


class Watched:
    """The cache of a server, and what it told."""

    def __init__(self, api: Api, kube: CachedKube, due: list[Key], restarts: list[tuple[str, str]]) -> None:
        self.api, self.kube, self.due, self.restarts = api, kube, due, restarts

    async def pods(self) -> set[str]:
        return {p["metadata"]["name"] for p in await self.kube.list_all("Pod", "default", {LABEL_SERVICE: "demo"})}

    async def shows(self, *names: str) -> None:
        assert self.kube.complete("Pod")
        await until(lambda: {ref["metadata"]["name"] for ref in self.kube.stores["Pod"].all()} == set(names), names)


async def until(check: Callable[[], bool], what: object) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not check():
        assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(resync_s: float = 3600.0, **settings: float) -> AsyncIterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "FIRST_BACKOFF_S", 0.02)
        for name, value in settings.items():
            patch.setattr(watching, name, value)
        api, app = Api(), web.Application()
        app.router.add_route("*", "/{path:.*}", api.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        configuration.connection_pool_maxsize = 0
        due: list[Key] = []
        restarts: list[tuple[str, str]] = []
        async with client.ApiClient(configuration) as http:
            kube = CachedKube(http)
            kube.open_stores(due.append)
            watches = Watches(kube, [], resync_s, lambda kind, why: restarts.append((kind, why)))
            task = asyncio.create_task(watches.run())
            try:
                api.put("a")
                await watches.filled()
                yield Watched(api, kube, due, restarts)
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await runner.cleanup()


async def test_a_reconcile_that_reads_makes_no_request() -> None:
    async with watched() as cluster:
        await cluster.shows("a")
        assert DEMO in cluster.due
        asked: list[str] = []
        cluster.kube.counted = lambda verb, kind, code: asked.append(kind)
        assert await cluster.pods() == {"a"}
        assert await cluster.kube.get("Pod", "default", "a") is not None
        assert await cluster.kube.get("Pod", "default", "b") is None
        assert asked == []


async def test_every_change_makes_the_service_due() -> None:
    async with watched() as cluster:
        await cluster.shows("a")
        cluster.due.clear()
        cluster.api.delete("a")
        await until(lambda: cluster.due == [DEMO], "the deletion to be told")
        await cluster.shows()


async def test_a_watch_that_is_cut_goes_on_where_it_was() -> None:
    async with watched() as cluster:
        cluster.api.put("b")
        await cluster.shows("a", "b")
        seen, lists = cluster.api.version, cluster.api.lists
        cluster.api.cut.set()
        cluster.api.cut = asyncio.Event()
        await until(lambda: ("Pod", "connection") in cluster.restarts, "the cut to be noticed")
        cluster.api.delete("a")
        await cluster.shows("b")
        assert cluster.api.watches[-1] == seen
        assert cluster.api.lists == lists, "what is known need not be listed"


async def test_when_the_server_has_forgotten_the_version_everything_is_listed() -> None:
    async with watched() as cluster:
        await cluster.shows("a")
        cluster.api.put("b")
        cluster.api.delete("a", tell=False)
        cluster.api.forgotten = cluster.api.version
        cluster.due.clear()
        cluster.api.cut.set()
        cluster.api.cut = asyncio.Event()
        await cluster.shows("b")
        assert ("Pod", "410") in cluster.restarts
        assert DEMO in cluster.due


async def test_a_deletion_that_the_watch_lost_heals_at_the_resync() -> None:
    async with watched(resync_s=1.0, END_GRACE_S=0.1) as cluster:
        cluster.api.delete("a", tell=False)
        cluster.due.clear()
        await cluster.shows()
        assert DEMO in cluster.due
        assert cluster.restarts == []


async def test_a_silent_watch_is_begun_again_without_a_list() -> None:
    async with watched(SILENCE_S=0.3) as cluster:
        await cluster.shows("a")
        lists = cluster.api.lists
        await until(lambda: cluster.restarts.count(("Pod", "silence")) >= 2, "two silences")
        assert cluster.api.lists == lists


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_is_asked_again(status: int) -> None:
    async with watched() as cluster:
        await cluster.shows("a")
        cluster.api.refuse = status
        cluster.api.cut.set()
        cluster.api.cut = asyncio.Event()
        await until(lambda: cluster.restarts.count(("Pod", str(status))) >= 2, "two refusals")
        assert await cluster.pods() == {"a"}, "what was known is still known"
        cluster.api.put("b")
        cluster.api.refuse = None
        await cluster.shows("a", "b")


async def test_a_kind_that_cannot_be_listed_is_read_from_the_server() -> None:
    async with watched() as cluster:
        asked: list[tuple[str, str]] = []
        cluster.kube.counted = lambda verb, kind, code: asked.append((verb, kind))
        cluster.kube.complete = lambda kind: kind != "Pod"
        assert await cluster.pods() == {"a"}
        assert asked == [("list", "Pod")]
