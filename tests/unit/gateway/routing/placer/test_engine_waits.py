"""Engines that are frozen, silent or briefly disconnected: waiting requests and routing."""

from __future__ import annotations

import asyncio
import time

import msgspec

from baton_protocol.options.config import GatewayConfig
from support.gateway.gateway_rig import MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
HEARTBEATS = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.5}


def test_the_default_heartbeat_timeout_is_below_5_seconds() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(GatewayConfig)}
    assert fields["heartbeat_timeout_s"] + fields["heartbeat_interval_s"] < 5.0, (
        "a group must recover within 5 s"
    )


async def test_late_outputs_of_a_frozen_engine_are_ignored(make_rig: MakeRig) -> None:
    rig = make_rig(**HEARTBEATS)
    frozen, other = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    frozen.hold_after, other.hold_after = 2, 4
    await rig.start(frozen)
    request = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 2, "two tokens")
    rig.announce(frozen, other)
    await rig.connected(frozen, other)
    frozen.freeze()
    frozen.released.set()
    await until(lambda: other.adds, "the request at the other engine")
    frozen.thaw()  # now both engines send tokens
    await until(lambda: frozen.num_unfinished == 0, "its late outputs")
    await rig.connected(frozen, other)
    other.released.set()
    assert await request == TEXT
    assert rig.metric("baton:token_offset_errors_total") == 0
    assert frozen.num_hellos >= 2, "the gateway did not reconnect"
    for _ in range(8):
        assert await rig.complete() == TEXT
    assert len(frozen.adds) > 1, "the engine got no new request"


async def test_a_silent_engine_gets_no_new_requests_but_keeps_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, heartbeat_timeout_s=60.0)
    silent, other = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    silent.hold_after = 2
    await rig.start(silent)
    request = asyncio.create_task(rig.complete())
    await until(lambda: silent.adds, "a request at the first engine")
    rig.announce(silent, other)
    await rig.connected(silent, other)
    silent.freeze()
    await rig.connected(other)
    for _ in range(6):
        assert await rig.complete() == TEXT
    assert len(silent.adds) == 1
    silent.release()
    silent.thaw()
    await rig.connected(silent, other)
    assert await request == TEXT, "its request was not kept"
    assert [len(request.generated_token_ids) for request in other.adds] == [0] * 6


async def test_a_stalled_gateway_does_not_count_engines_as_dead(make_rig: MakeRig) -> None:
    rig = make_rig(**HEARTBEATS)
    engine = rig.engine("d", "decode", TEXT, hold_after=2)
    await rig.start(engine)
    request = asyncio.create_task(rig.complete())
    await until(lambda: engine.adds, "the request at the engine")
    for _ in range(3):
        time.sleep(3 * HEARTBEATS["heartbeat_timeout_s"])  # noqa: ASYNC251 (this is what is tested)
        await asyncio.sleep(0)
    engine.released.set()
    assert await request == TEXT
    assert rig.metric("baton:request_retries_total", reason="engine_lost") == 0


async def test_new_requests_wait_while_a_group_forms(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=10.0)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(2)]
    await rig.start(*engines)
    for engine in engines:
        engine.retire()
    await rig.connected()
    request = [asyncio.create_task(rig.complete()) for _ in range(4)]
    await until(lambda: rig.metric("baton:requests_in_flight") == 4, "four requests waiting")
    assert not any(engine.adds for engine in engines)
    engines[0].admit(0, 1)
    assert await asyncio.gather(*request) == [TEXT] * 4


async def test_new_requests_wait_no_longer_than_queue_wait_s(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=0.3)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    engine.retire()
    await rig.connected()
    for stream in (False, True):
        began = time.monotonic()
        status, body, headers = await rig.post(
            "/v1/completions", {"model": "m", "prompt": "go", "stream": stream}
        )
        assert (status, body["error"]["code"]) == (503, "no_ready_engine")
        assert int(headers["Retry-After"]) > 0
        assert 0.3 <= time.monotonic() - began < 5.0
    assert rig.metric("baton:requests_in_flight") == 0


async def test_a_stream_waits_while_its_group_forms(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=0.0, resume_wait_s=10.0)
    engines = [rig.engine(f"d{index}", "decode", TEXT, hold_after=3) for index in range(2)]
    await rig.start(*engines)
    request = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 3, "three tokens")
    for engine in engines:
        engine.hold_after = None
        engine.retire()
    await rig.connected()
    await asyncio.wait([request], timeout=0.2)
    assert not request.done()
    engines[1].admit(0, 1)
    assert await request == TEXT


async def test_a_waiting_request_is_dropped_when_its_client_disconnects(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=10.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    engine.retire()
    await rig.connected()
    request = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric("baton:requests_in_flight") == 1, "the request waiting")
    request.cancel()
    await until(lambda: rig.metric("baton:requests_in_flight") == 0, "no request waiting")
    engine.admit(0, 1)
    await rig.connected(engine)
    assert not engine.adds


async def test_a_burst_is_balanced_by_heartbeats_and_requests_sent_since(make_rig: MakeRig) -> None:
    """One engine is busier because of another gateway. A burst fills the other one first."""
    rig = make_rig(heartbeat_interval_s=0.05)
    busy, idle = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    busy.num_running, idle.num_running = 6, 4
    for engine in (busy, idle):
        engine.hold_after = 0
    await rig.start(busy, idle)
    members = rig.gateway.pool.available("decode")
    await until(
        lambda: sum(member.load()[1] for member in members) == 10, "the loads from heartbeats"
    )
    busy.freeze()
    idle.freeze()  # no heartbeat reports the burst
    request = [asyncio.create_task(rig.complete()) for _ in range(6)]
    busy.thaw()
    idle.thaw()
    await until(lambda: len(busy.adds) + len(idle.adds) == 6, "six requests at the engines")
    for engine in (busy, idle):
        engine.release()
    assert await asyncio.gather(*request) == [TEXT] * 6
    assert (len(busy.adds), len(idle.adds)) == (2, 4)
