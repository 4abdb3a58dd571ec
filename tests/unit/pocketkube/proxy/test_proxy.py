"""The Service and ingress proxies: endpoints, routes, streaming and connection life cycle."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton_kube.client import Object
from pocketkube.loopback import LoopbackAddresses
from pocketkube.proxy.ingress_proxy import IngressProxy
from pocketkube.proxy.service_proxy import ServiceProxy
from pocketkube.proxy.service_routes import Backend, endpoints, match_route, routes
from support.waiting import until


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


class Addresses:
    """Replaces LoopbackAddresses without changing the device."""

    def __init__(self) -> None:
        self.assigned: set[str] = set()

    def add(self, address: str) -> None:
        self.assigned.add(address)

    def keep_only(self, addresses: Collection[str]) -> None:
        self.assigned &= set(addresses)

    def remove_all(self) -> None:
        self.assigned.clear()


class Events:
    """Collects the reasons of recorded events."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record(self, obj: Object, kind: str, reason: str, message: str, **more: str) -> None:
        self.reasons.append(reason)


def test_endpoints_are_ready_selected_pods_that_do_not_terminate() -> None:
    pods = [
        pod("a", "127.1.1.1"),
        pod("unready", "127.1.1.2", ready=False),
        pod("leaving", "127.1.1.3", deletionTimestamp="2026-01-01T00:00:00Z"),
        {
            **pod("other", "127.1.1.4"),
            "metadata": {"name": "other", "namespace": "ns", "labels": {"app": "db"}},
        },
        {
            **pod("far", "127.1.1.5"),
            "metadata": {"name": "far", "namespace": "elsewhere", "labels": {"app": "web"}},
        },
    ]
    port = service()["spec"]["ports"][0]
    assert endpoints(service(), port, pods) == [("127.1.1.1", 8000)]
    assert endpoints(service(publishNotReadyAddresses=True), port, pods) == [
        ("127.1.1.1", 8000),
        ("127.1.1.2", 8000),
    ]
    assert endpoints(service(selector={}), port, pods) == []
    assert endpoints(service(), {"port": 90}, pods) == [("127.1.1.1", 90)]


@pytest.mark.parametrize(
    ("host", "path", "name"),
    [
        ("web.test", "/v1/models", "api"),
        ("WEB.test", "/v1", "api"),
        ("web.test", "/v1x", "root"),
        ("web.test", "/v1/exact", "exact"),
        ("a.wild.test", "/", "wild"),
        ("a.b.wild.test", "/", None),
        ("unknown.test", "/", None),
    ],
)
def test_an_ingress_route_prefers_host_then_exact_then_longest_prefix(
    host: str, path: str, name: str | None
) -> None:
    rules = ingress(
        ("/", "Prefix", "root"), ("/v1", "Prefix", "api"), ("/v1/exact", "Exact", "exact")
    )
    table = routes([ingress(("/", "Prefix", "wild"), host="*.wild.test"), rules])
    assert match_route(table, host, path) == (Backend("ns", name, "web") if name else None)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """Start an app at an address. Return its port."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(app: web.Application, address: str, **options: Any) -> int:
            runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, address, 0).start()
            return runner.addresses[0][1]

        yield start


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


async def test_a_service_skips_unreachable_pods_and_streams_unbuffered(
    serve, tmp_path: Path
) -> None:
    more, ended = asyncio.Event(), asyncio.Event()
    port = await serve(streaming_app(more, ended), "127.97.1.2")
    pods = Cache(pod("dead", "127.97.1.1", port=port), pod("alive", "127.97.1.2", port=port))
    services, events = Cache(service("127.97.0.7", 8080)), Events()
    proxy = ServiceProxy(services, pods, events, LoopbackAddresses(tmp_path / "a.json"))
    async with running(proxy.run()):
        await until(lambda: proxy._listeners, "the listener")
        async with aiohttp.ClientSession() as http:
            for _ in range(2):  # round robin may start with either pod
                more.clear()
                async with http.post("http://127.97.0.7:8080/stream", data=b"in ") as response:
                    assert await asyncio.wait_for(response.content.readany(), 60) == b"in one\n\n"
                    more.set()
                    assert await response.content.read() == b"none"
        assert events.reasons == []


async def test_connections_of_a_deleted_service_continue_until_they_end(serve) -> None:
    more, ended = asyncio.Event(), asyncio.Event()
    port = await serve(streaming_app(more, ended), "127.97.1.3")
    services, pods, addresses = (
        Cache(service("127.97.0.9", 8080)),
        Cache(pod("alive", "127.97.1.3", port=port)),
        Addresses(),
    )
    proxy = ServiceProxy(services, pods, Events(), addresses)
    async with running(proxy.run()):
        await until(lambda: proxy._listeners, "the listener")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            async with http.post("http://127.97.0.9:8080/stream", data=b"") as response:
                assert await asyncio.wait_for(response.content.readany(), 60) == b"one\n\n"
                services.remove("ns/web")
                await until(lambda: not proxy._listeners, "the listener closed")
                assert addresses.assigned == {"127.97.0.9"}
                more.set()
                assert await response.content.read() == b"none"
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.post("http://127.97.0.9:8080/stream", data=b"")
        await until(lambda: not addresses.assigned, "the address removed")


@pytest.mark.parametrize("ticks", range(10))
async def test_a_connection_made_while_a_service_is_deleted_is_closed(ticks: int) -> None:
    services = Cache(service("127.97.0.10", 8080))
    proxy = ServiceProxy(services, Cache(), Events(), Addresses())

    async def read_until_closed() -> bytes:
        reader, writer = await asyncio.open_connection("127.97.0.10", 8080)
        try:
            return await reader.read()
        finally:
            writer.close()

    async with running(proxy.run()):
        await until(lambda: proxy._listeners, "the listener")
        connecting = asyncio.create_task(read_until_closed())
        for _ in range(ticks):
            await asyncio.sleep(0)
        services.remove("ns/web")
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await connecting == b""


async def test_a_port_in_use_is_reported_as_an_event(serve, tmp_path: Path) -> None:
    port = await serve(web.Application(), "127.97.0.8")
    services, events = Cache(service("127.97.0.8", port)), Events()
    proxy = ServiceProxy(services, Cache(), events, LoopbackAddresses(tmp_path / "a.json"))
    async with running(proxy.run()):
        await until(lambda: events.reasons == ["BindFailed"], "the event BindFailed")


async def test_the_ingress_streams_and_cancels_when_the_client_disconnects(
    serve, tmp_path: Path
) -> None:
    more, ended = asyncio.Event(), asyncio.Event()
    port = await serve(streaming_app(more, ended), "127.97.2.2", handler_cancellation=True)
    services = Cache(service("127.97.0.9"))
    pods = Cache(pod("dead", "127.97.2.1", port=port), pod("alive", "127.97.2.2", port=port))
    proxy = ServiceProxy(services, pods, Events(), LoopbackAddresses(tmp_path / "a.json"))
    rules = ingress(("/", "Prefix", "web"))
    rules["status"] = {"loadBalancer": {"ingress": [{"ip": "127.97.2.9"}]}}
    front = IngressProxy(None, Cache(rules), Cache(), services, proxy)
    url, headers = "http://127.97.2.9:18080/stream", {"Host": "web.test"}
    async with running(front.run("127.97.2.9", 18080)):
        await until(lambda: front._table, "the routes")
        async with aiohttp.ClientSession() as http:
            for _ in range(2):
                more.clear()
                async with http.post(url, data=b"in ", headers=headers) as response:
                    assert await asyncio.wait_for(response.content.readany(), 60) == b"in one\n\n"
                    more.set()
                    assert await response.content.read() == b"web.test"
            more.clear()
            ended.clear()
            response = await http.get(url, headers=headers)
            assert await asyncio.wait_for(response.content.readany(), 60) == b"one\n\n"
            response.close()
            await asyncio.wait_for(ended.wait(), 60)
            async with http.get("http://127.97.2.9:18080/", headers={"Host": "x.test"}) as response:
                assert response.status == 404
            pods.objects.clear()
            async with http.get(url, headers=headers) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
