"""The graceful shutdown of a gateway: it serves until clients stop sending requests."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from baton_gateway.http.connections import Connections
from baton_gateway.http.cors import CORS
from baton_gateway.http.listener import listen, stop_listening
from baton_gateway.metrics import GatewayMetrics
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
QUESTION = {"model": "m", "prompt": "go"}


async def rig_of(make_rig: MakeRig, **config: float) -> GatewayRig:
    rig = make_rig(**config)
    await rig.start(rig.engine("d", "decode", TEXT))
    return rig


async def is_not_ready(rig: GatewayRig) -> bool:
    return (await rig.get("/ready"))[0] == 503


async def test_new_requests_are_served_until_none_arrive(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=2.4, drain_timeout_s=60.0)
    shutdown = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    # Time is the input: the pauses are shorter than drain_quiet_s, and together longer.
    for _ in range(4):
        await asyncio.sleep(0.8)
        assert not shutdown.done()
        last = time.monotonic()
        status, body, headers = await rig.post("/v1/completions", QUESTION)
        assert (status, headers["Connection"]) == (200, "close")
        assert body["choices"][0]["text"] == TEXT
    async with asyncio.timeout(60.0):
        await shutdown
    assert time.monotonic() - last >= 2.4


async def test_probes_and_scrapes_do_not_delay_the_shutdown(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=0.3, drain_timeout_s=60.0)
    shutdown = asyncio.create_task(rig.gateway.shut_down())

    async def has_ended() -> bool:
        try:
            await rig.get("/health")
            await rig.scrape()
        except aiohttp.ClientError:
            await shutdown
        return shutdown.done()

    await until(has_ended, "the end of the gateway while it is probed")


async def test_a_stream_may_last_longer_than_drain_quiet_s(make_rig: MakeRig) -> None:
    rig = make_rig(drain_quiet_s=0.05, drain_timeout_s=60.0)
    engine = rig.engine("d", "decode", TEXT, hold_after=2)
    await rig.start(engine)
    stream = await rig.client().completions.create(stream=True, **QUESTION)
    first = await anext(aiter(stream))
    shutdown = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    await asyncio.sleep(0.3)  # time is the input: longer than drain_quiet_s
    assert not shutdown.done()
    engine.released.set()
    rest = [chunk.choices[0].text async for chunk in stream]
    assert first.choices[0].text + "".join(rest) == TEXT
    async with asyncio.timeout(60.0):
        await shutdown


async def test_a_keep_alive_connection_is_asked_to_close(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=2.0, drain_timeout_s=60.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:

        async def ask() -> tuple[str | None, bytes]:
            async with session.post(f"{rig.url}/v1/completions", json=QUESTION) as response:
                assert response.status == 200
                return response.headers.get("Connection"), await response.read()

        assert (await ask())[0] is None
        shutdown = asyncio.create_task(rig.gateway.shut_down())
        await until(lambda: is_not_ready(rig), "/ready to answer 503")
        assert (await ask())[0] == "close"  # on the same connection
        async with asyncio.timeout(60.0):
            await shutdown


async def test_after_the_drain_timeout_requests_are_refused(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=50.0, drain_timeout_s=4.0)
    shutdown = asyncio.create_task(rig.gateway.shut_down())
    codes = []
    async with asyncio.timeout(60.0):
        while not shutdown.done():
            try:
                codes.append((await rig.post("/v1/completions", QUESTION))[0])
            except aiohttp.ClientError:
                break
        await shutdown
    assert codes[0] == 200
    assert set(codes) <= {200, 503}


async def test_a_second_signal_ends_the_drain(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=50.0, drain_timeout_s=600.0)
    shutdown = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    rig.gateway.end_drain()  # called by the signal handler
    async with asyncio.timeout(60.0):
        await shutdown


@pytest.mark.parametrize("ticks", [*range(10), None])
async def test_a_connection_during_the_end_is_served_refused_or_closed(ticks: int | None) -> None:
    """A client connects in one of the last iterations of the event loop.

    A request that was received (None) must be served.
    """
    received = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        received.set()
        return web.Response(text="served")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    connections = Connections(1000, GatewayMetrics())
    listener = await listen(runner, "127.0.0.1", 0, None, connections, CORS(()))
    port = listener.sockets[0].getsockname()[1]

    async def ask() -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/") as response,
        ):
            return await response.text()

    asked = asyncio.create_task(ask())
    if ticks is None:
        async with asyncio.timeout(60.0):
            await received.wait()
    for _ in range(ticks or 0):
        await asyncio.sleep(0)
    await stop_listening(listener)
    await runner.cleanup()
    async with asyncio.timeout(60.0):
        try:
            assert await asked == "served"
        except aiohttp.ClientError:
            assert ticks is not None, "a received request was not served"
