"""Discovery by watching pods and the gateway's Service, against a minimal API server over TLS."""

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
from baton_gateway.routing.kubernetes_discovery import KubernetesDiscovery, endpoint_of
from support.gateway.certificates import write_certificate
from support.http_server import serving
from support.waiting import until

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


def gateway_service(version: int, **annotations: str) -> dict[str, Any]:
    metadata = {"name": "demo-gateway", "namespace": "ns", "resourceVersion": str(version)}
    keys = {
        f"serving.baton.dev/{name.replace('_', '-')}": value for name, value in annotations.items()
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {**metadata, "annotations": keys}}


class Collection:
    """Lists `objects`. A watch sends the objects of `events`."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.queries: list[dict[str, str]] = []
        self.tokens: set[str | None] = set()
        self.status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        self.queries.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if request.query.get("watch") not in ("true", "True"):
            metadata = {"resourceVersion": "7"}
            return web.json_response(
                {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": self.objects}
            )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    event = await self.events.get()
                    await response.write(json.dumps(event).encode() + b"\n")
        return response


class ApiServer:
    def __init__(self) -> None:
        self.pods, self.services = Collection(), Collection()


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
    routes = [
        web.get("/api/v1/namespaces/ns/pods", server.pods.handle),
        web.get("/api/v1/namespaces/ns/services", server.services.handle),
    ]
    async with serving(*routes, tls=tls) as port:
        monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        yield server


async def next_set(sets: Any) -> list[tuple[str, str, bool]]:
    endpoints = await asyncio.wait_for(anext(sets), 60)
    return [(endpoint.name, endpoint.host, endpoint.draining) for endpoint in endpoints]


async def test_pods_are_listed_then_watched(api: ApiServer) -> None:
    api.pods.objects = [pod("a", "10.0.0.1", 5)]
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=60).watch()) as sets:
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
        api.pods.events.put_nowait({"type": "ADDED", "object": pod("b", "10.0.0.2", 8)})
        assert await next_set(sets) == [("a", "10.0.0.1", False), ("b", "10.0.0.2", False)]
        api.pods.events.put_nowait(
            {
                "type": "MODIFIED",
                "object": pod("a", "10.0.0.1", 9, deletionTimestamp="2026-01-01T00:00:00Z"),
            }
        )
        assert await next_set(sets) == [("a", "10.0.0.1", True), ("b", "10.0.0.2", False)]
        api.pods.events.put_nowait({"type": "DELETED", "object": pod("a", "10.0.0.1", 10)})
        assert await next_set(sets) == [("b", "10.0.0.2", False)]
    listing, watching = api.pods.queries
    assert "serving.baton.dev/service=demo" in listing["labelSelector"]
    assert watching["resourceVersion"] == "7"
    assert {token.lower() for token in api.pods.tokens if token} == {"bearer secret"}


async def test_the_next_list_finds_a_lost_deletion(api: ApiServer) -> None:
    api.pods.objects = [pod("a", "10.0.0.1", 5)]
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=1).watch()) as sets:
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
        api.pods.objects = []
        assert await next_set(sets) == []


async def test_discovery_waits_for_the_service_account(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_discovery, "CONNECT_RETRY_S", 0.05)
    token = tmp_path / ACCOUNT / "token"
    token.unlink()
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=60).watch()) as sets:
        first = asyncio.create_task(next_set(sets))
        await asyncio.sleep(0.2)  # time for several attempts to connect, which nothing shows
        assert not first.done()
        token.write_text("secret")
        assert await first == []


async def test_an_annotation_of_the_gateway_service_shows_a_scale_to_zero_by_hand(
    api: ApiServer,
) -> None:
    discovery = KubernetesDiscovery("ns", "demo", resync_s=60)
    assert not discovery.is_scaled_to_zero, "nothing is known before the first list"
    api.services.objects = [gateway_service(5, applied="x")]
    async with contextlib.aclosing(discovery.watch()) as sets:
        assert await next_set(sets) == []
        assert not discovery.is_scaled_to_zero
        scaled = gateway_service(8, applied="y", scaled_to_zero="true")
        api.services.events.put_nowait({"type": "MODIFIED", "object": scaled})
        await until(lambda: discovery.is_scaled_to_zero, "the service scaled to zero")
        back = gateway_service(9, applied="x")
        api.services.events.put_nowait({"type": "MODIFIED", "object": back})
        await until(lambda: not discovery.is_scaled_to_zero, "the service scaled up")
    listing = api.services.queries[0]["labelSelector"]
    assert listing == "serving.baton.dev/service=demo,serving.baton.dev/role=gateway"


async def test_engines_are_found_without_the_right_to_watch_services(api: ApiServer) -> None:
    api.services.status = 403
    api.pods.objects = [pod("a", "10.0.0.1", 5)]
    discovery = KubernetesDiscovery("ns", "demo", resync_s=60)
    async with contextlib.aclosing(discovery.watch()) as sets:
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
        await until(lambda: len(api.services.queries) > 0, "a request for Services")
        assert not discovery.is_scaled_to_zero


def pod_with(**changes: object) -> dict[str, object]:
    labels = {"serving.baton.dev/role": "decode"}
    return {
        "metadata": {"name": "demo-decode-0", "labels": labels, **changes.pop("metadata", {})},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True"}],
            **changes,
        },
    }


def test_a_running_ready_pod_with_an_address_is_an_endpoint() -> None:
    endpoint = endpoint_of(pod_with())
    assert (endpoint.name, endpoint.role, endpoint.host, endpoint.draining) == (
        "demo-decode-0",
        "decode",
        "10.0.0.7",
        False,
    )
    for broken in (
        pod_with(phase="Pending"),
        pod_with(podIP=None),
        pod_with(conditions=[{"type": "Ready", "status": "False"}]),
        pod_with(conditions=None),
        pod_with(metadata={"labels": {"serving.baton.dev/role": "gateway"}}),
        pod_with(metadata={"labels": None}),
    ):
        assert endpoint_of(broken) is None


def test_a_terminating_or_annotated_pod_is_draining() -> None:
    assert endpoint_of(pod_with(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})).draining
    assert endpoint_of(
        pod_with(metadata={"annotations": {"serving.baton.dev/draining": "true"}})
    ).draining
    assert not endpoint_of(
        pod_with(metadata={"annotations": {"serving.baton.dev/draining": "false"}})
    ).draining
