"""The Ingress proxy streams, and cancels when the client disconnects."""

import asyncio
from pathlib import Path

import aiohttp

from pocketkube.loopback import LoopbackAddresses
from pocketkube.proxy.ingress_proxy import IngressProxy
from pocketkube.proxy.service_proxy import ServiceProxy
from support.pocketkube.proxied_objects import (
    Cache,
    Events,
    ingress,
    pod,
    running,
    service,
    streaming_app,
)
from support.waiting import until


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
