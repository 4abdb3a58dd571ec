"""The engine pool: engines are added, removed, drained and restarted."""

from __future__ import annotations

import asyncio

import msgspec

from support.gateway.gateway_rig import GatewayRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"


async def test_added_engines_are_used_and_removed_ones_finish_their_requests(
    rig: GatewayRig,
) -> None:
    old, new = rig.engine("d0", "decode", TEXT, hold_after=2), rig.engine("d1", "decode", TEXT)
    await rig.start(old)
    running = asyncio.create_task(rig.complete())
    await until(lambda: old.adds, "the request at the old engine")
    rig.announce(new)
    await rig.connected(new)
    assert await rig.complete() == TEXT
    assert len(new.adds) == 1
    old.released.set()
    assert await running == TEXT
    assert not old.aborts


async def test_a_draining_engine_gets_no_new_requests(rig: GatewayRig) -> None:
    leaving, staying = rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)
    await rig.start(leaving, staying)
    rig.announce_endpoints(
        msgspec.structs.replace(leaving.endpoint, draining=True), staying.endpoint
    )
    await rig.connected(staying)
    for _ in range(6):
        assert await rig.complete() == TEXT
    assert not leaving.adds
    rig.announce(leaving, staying)
    await rig.connected(leaving, staying)


async def test_a_restarted_engine_is_reconnected(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    engine.die()
    await rig.connected()
    status, body, _ = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert (await rig.get("/ready"))[0] == 200  # a client that triggers it
    successor = rig.engine("d", "decode", TEXT, port=engine.port)
    await rig.connected(successor)
    assert await rig.complete() == TEXT


async def test_the_pool_connects_to_an_engine_that_starts_later(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    engine.die()
    rig.announce(engine)
    port = await rig.gateway.start("127.0.0.1")
    rig.url = f"http://127.0.0.1:{port}"
    late = rig.engine("d", "decode", TEXT, port=engine.port)
    await rig.connected(late)


async def test_requests_are_sent_to_the_least_loaded_engine(rig: GatewayRig) -> None:
    engines = [rig.engine(f"d{i}", "decode", TEXT, hold_after=0) for i in range(3)]
    await rig.start(*engines)
    running = [asyncio.create_task(rig.complete()) for _ in range(9)]
    await until(
        lambda: sum(len(engine.adds) for engine in engines) == 9, "nine requests at the engines"
    )
    assert [len(engine.adds) for engine in engines] == [3, 3, 3]
    for engine in engines:
        engine.released.set()
    assert await asyncio.gather(*running) == [TEXT] * 9
