"""A gateway that is told to go fails nobody: it serves on until those who send requests have noticed."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from baton_gateway.http.listener import listen, stop_listening
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


async def test_new_requests_are_served_until_nobody_sends_any(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=2.4, drain_timeout_s=60.0)
    leaving = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    for _ in range(4):  # together longer than it would wait for the first
        await asyncio.sleep(0.8)
        assert not leaving.done()
        status, body, headers = await rig.post("/v1/completions", QUESTION)
        assert (status, headers["Connection"]) == (200, "close")
        assert body["choices"][0]["text"] == TEXT
    last = time.monotonic()
    async with asyncio.timeout(60.0):
        await leaving
    assert time.monotonic() - last >= 2.0


async def test_probes_and_scrapes_do_not_keep_it(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=0.3, drain_timeout_s=60.0)
    leaving = asyncio.create_task(rig.gateway.shut_down())

    async def left() -> bool:
        try:
            for path in ("/health", "/metrics"):
                await rig.get(path)
        except aiohttp.ClientError:
            await leaving
        return leaving.done()

    await until(left, "the gateway to leave while it is probed all the time")


async def test_a_stream_outlives_the_quiet(make_rig: MakeRig) -> None:
    rig = make_rig(drain_quiet_s=0.05, drain_timeout_s=60.0)
    engine = rig.engine("d", "decode", TEXT)
    engine.hold_after = 2
    await rig.start(engine)
    stream = await rig.client().completions.create(stream=True, **QUESTION)
    first = await anext(aiter(stream))
    leaving = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    await asyncio.sleep(0.3)
    assert not leaving.done()
    engine.released.set()
    rest = [chunk.choices[0].text async for chunk in stream]
    assert first.choices[0].text + "".join(rest) == TEXT
    async with asyncio.timeout(60.0):
        await leaving


async def test_a_connection_that_was_kept_open_is_asked_to_go(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=2.0, drain_timeout_s=60.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:

        async def ask() -> tuple[str | None, bytes]:
            async with session.post(f"{rig.url}/v1/completions", json=QUESTION) as response:
                assert response.status == 200
                return response.headers.get("Connection"), await response.read()

        assert (await ask())[0] is None
        leaving = asyncio.create_task(rig.gateway.shut_down())
        await until(lambda: is_not_ready(rig), "/ready to answer 503")
        assert (await ask())[0] == "close"  # on the connection of before
        async with asyncio.timeout(60.0):
            await leaving


async def test_who_does_not_stop_asking_is_refused_in_the_end(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=50.0, drain_timeout_s=4.0)
    leaving = asyncio.create_task(rig.gateway.shut_down())
    codes = []
    async with asyncio.timeout(60.0):
        while not leaving.done():
            try:
                codes.append((await rig.post("/v1/completions", QUESTION))[0])
            except aiohttp.ClientError:
                break
        await leaving
    assert codes[0] == 200
    assert set(codes) <= {200, 503}


async def test_a_second_signal_ends_the_wait(make_rig: MakeRig) -> None:
    rig = await rig_of(make_rig, drain_quiet_s=50.0, drain_timeout_s=600.0)
    leaving = asyncio.create_task(rig.gateway.shut_down())
    await until(lambda: is_not_ready(rig), "/ready to answer 503")
    rig.gateway.end_drain()  # what the signal's handler does
    async with asyncio.timeout(60.0):
        await leaving


@pytest.mark.parametrize("ticks", [*range(10), None])
async def test_no_connection_is_left_unanswered(ticks: int | None) -> None:
    """A client that connects in any of the last ticks of the event loop is served, refused or cut off; one whose request was
    received (None) is served."""
    received = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        received.set()
        return web.Response(text="served")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    listener = await listen(runner, "127.0.0.1", 0, None)
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
            assert ticks is not None, "its request was received"
