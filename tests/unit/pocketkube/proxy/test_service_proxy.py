"""The Service proxy: unreachable pods, streaming and connection life cycle."""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pocketkube.loopback import LoopbackAddresses
from pocketkube.proxy.service_proxy import ServiceProxy
from support.pocketkube.proxied_objects import (
    Cache,
    Events,
    pod,
    running,
    service,
    streaming_app,
)
from support.waiting import until


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
