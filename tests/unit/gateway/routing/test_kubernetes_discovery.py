"""Discovery by watching pods, against a minimal API server over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton_gateway.routing import kubernetes_discovery
from baton_gateway.routing.kubernetes_discovery import KubernetesDiscovery
from support.gateway.certificates import write_certificate
from support.http_server import serving

ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"


def pod(name: str, host: str, version: int, **metadata: Any) -> dict[str, Any]:
    labels = {"serving.baton.dev/service": "demo", "serving.baton.dev/role": "decode"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "resourceVersion": str(version),
            "labels": labels,
            **metadata,
        },
        "status": {
            "phase": "Running",
            "podIP": host,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class ApiServer:
    """Lists `pods`. A watch sends the objects of `events`."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.queries: list[dict[str, str]] = []
        self.tokens: set[str | None] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        self.queries.append(dict(request.query))
        if request.query.get("watch") not in ("true", "True"):
            metadata = {"resourceVersion": "7"}
            return web.json_response(
                {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": self.pods}
            )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    event = await self.events.get()
                    await response.write(json.dumps(event).encode() + b"\n")
        return response


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    account = tmp_path / ACCOUNT
    account.mkdir(parents=True)
    (account / "token").write_text("secret")
    write_certificate(account, "kubernetes")
    (account / "tls.crt").rename(account / "ca.crt")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(account / "ca.crt", account / "tls.key")
    async with serving(web.get("/api/v1/namespaces/ns/pods", server.handle), tls=tls) as port:
        monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        yield server


async def next_set(sets: Any) -> list[tuple[str, str, bool]]:
    endpoints = await asyncio.wait_for(anext(sets), 60)
    return [(endpoint.name, endpoint.host, endpoint.draining) for endpoint in endpoints]


async def test_pods_are_listed_then_watched(api: ApiServer):
    api.pods = [pod("a", "10.0.0.1", 5)]
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=60).watch()) as sets:
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
        api.events.put_nowait({"type": "ADDED", "object": pod("b", "10.0.0.2", 8)})
        assert await next_set(sets) == [("a", "10.0.0.1", False), ("b", "10.0.0.2", False)]
        api.events.put_nowait(
            {
                "type": "MODIFIED",
                "object": pod("a", "10.0.0.1", 9, deletionTimestamp="2026-01-01T00:00:00Z"),
            }
        )
        assert await next_set(sets) == [("a", "10.0.0.1", True), ("b", "10.0.0.2", False)]
        api.events.put_nowait({"type": "DELETED", "object": pod("a", "10.0.0.1", 10)})
        assert await next_set(sets) == [("b", "10.0.0.2", False)]
    listing, watching = api.queries
    assert "serving.baton.dev/service=demo" in listing["labelSelector"]
    assert watching["resourceVersion"] == "7"
    assert {token.lower() for token in api.tokens if token} == {"bearer secret"}


async def test_the_next_list_finds_a_lost_deletion(api: ApiServer):
    api.pods = [pod("a", "10.0.0.1", 5)]
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=1).watch()) as sets:
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
        api.pods = []
        assert await next_set(sets) == []


async def test_discovery_waits_for_the_service_account(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kubernetes_discovery, "CONNECT_RETRY_S", 0.05)
    token = tmp_path / ACCOUNT / "token"
    token.unlink()
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=60).watch()) as sets:
        first = asyncio.create_task(next_set(sets))
        await asyncio.sleep(0.2)  # time for several attempts to connect, which nothing shows
        assert not first.done()
        token.write_text("secret")
        assert await first == []
