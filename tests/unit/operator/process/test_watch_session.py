"""The requests of kopf's watches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiohttp import web

from baton_kube.client import METADATA
from baton_operator.process.watch_session import WatchSession
from support.kube.kube_api_server import PODS, ApiServer, serving


async def test_watches_request_only_metadata_and_lists_queue_all_services_once() -> None:
    server = ApiServer()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({})

    server.handler = answer
    listed: list[str] = []
    async with serving(server) as kube:
        runtime: Any = SimpleNamespace(
            kube=SimpleNamespace(client=kube),
            count_request=lambda *_: None,
            queue_all=listed.append,
        )
        async with WatchSession(runtime).open() as session:
            for path in (PODS, f"{PODS}?continue=x", f"{PODS}?watch=true", "/api/v1"):
                async with session.get(kube.server + path) as response:
                    assert response.status == 200
    assert [asked.accept for asked in server.asked] == ["*/*", "*/*", METADATA, "*/*"]
    assert listed == [PODS]
