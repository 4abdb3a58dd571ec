"""Discovery by watching pods, against a minimal API server over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton_gateway.routing import kubernetes_discovery
from baton_gateway.routing.kubernetes_discovery import KubernetesDiscovery

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
        self.lists = 0
        self.queries: list[dict[str, str]] = []
        self.tokens: set[str | None] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        self.queries.append(dict(request.query))
        if request.query.get("watch") not in ("true", "True"):
            self.lists += 1
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


def certificate(folder: Path) -> ssl.SSLContext:
    """Create a self-signed certificate for 127.0.0.1 and write the service account's ca.crt."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(made.public_bytes(pem))
    no_password = serialization.NoEncryption()
    (folder / "key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ca.crt", folder / "key")
    return context


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    account = tmp_path / ACCOUNT
    account.mkdir(parents=True)
    (account / "token").write_text("secret")
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/pods", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=certificate(account)).start()
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
    yield server
    await runner.cleanup()


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
        await asyncio.sleep(0.2)  # several attempts to connect
        assert not first.done()
        token.write_text("secret")
        assert await first == []


async def test_an_expired_watch_is_followed_by_a_list(api: ApiServer):
    async with contextlib.aclosing(KubernetesDiscovery("ns", "demo", resync_s=60).watch()) as sets:
        assert await next_set(sets) == []
        api.pods = [pod("a", "10.0.0.1", 5)]
        gone = {
            "kind": "Status",
            "status": "Failure",
            "code": 410,
            "reason": "Expired",
            "message": "too old",
        }
        api.events.put_nowait({"type": "ERROR", "object": gone})
        assert await next_set(sets) == [("a", "10.0.0.1", False)]
    assert api.lists == 2
