"""Engines that are frozen, silent or away for a moment: who waits, for how long, and who gets new requests."""

from __future__ import annotations

import asyncio
import time

import msgspec
import openai
import pytest

from baton_protocol.config import GatewayConfig
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
HEARTBEATS = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.5}


async def complete(rig: GatewayRig, **options) -> str:
    answer = await rig.client().completions.create(model="m", prompt="go", max_tokens=50, **options)
    return answer.choices[0].text


def test_a_frozen_engine_is_given_up_within_seconds():
    fields = {field.name: field.default for field in msgspec.structs.fields(GatewayConfig)}
    assert fields["heartbeat_timeout_s"] + fields["heartbeat_interval_s"] < 5.0, (
        "a group is to serve again by then"
    )


async def test_a_frozen_engine_that_wakes_up_disturbs_nobody(make_rig: MakeRig):
    rig = make_rig(**HEARTBEATS)
    frozen, other = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    frozen.hold_after, other.hold_after = 2, 4
    await rig.start(frozen)
    asking = asyncio.create_task(complete(rig))
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 2, "two tokens")
    rig.announce(frozen, other)
    await rig.connected(frozen, other)
    frozen.freeze()
    frozen.released.set()
    await until(lambda: other.adds, "the request at the other engine")
    frozen.thaw()  # it says the rest of its tokens now, and so do those of the engine that has the request
    await until(lambda: frozen.num_unfinished == 0, "its late outputs said")
    await rig.connected(frozen, other)
    other.released.set()
    assert await asking == TEXT
    assert rig.metric("baton:token_offset_errors_total") == 0
    assert frozen.num_hellos >= 2, "the same instance, connected anew"
    for _ in range(8):
        assert await complete(rig) == TEXT
    assert len(frozen.adds) > 1, "it serves again"


async def test_a_silent_engine_gets_nothing_new_before_it_counts_as_dead(make_rig: MakeRig):
    rig = make_rig(heartbeat_interval_s=0.05, heartbeat_timeout_s=60.0)
    silent, other = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    silent.hold_after = 2
    await rig.start(silent)
    asking = asyncio.create_task(complete(rig))
    await until(lambda: silent.adds, "a request at the first engine")
    rig.announce(silent, other)
    await rig.connected(silent, other)
    silent.freeze()
    await rig.connected(other)
    for _ in range(6):
        assert await complete(rig) == TEXT
    assert len(silent.adds) == 1
    silent.hold_after = None
    silent.released.set()
    silent.thaw()
    await rig.connected(silent, other)
    assert await asking == TEXT, "it was not dead: its requests have stayed"
    assert [len(request.generated_token_ids) for request in other.adds] == [0] * 6


async def test_a_gateway_that_did_not_run_itself_blames_no_engine(make_rig: MakeRig):
    rig = make_rig(**HEARTBEATS)
    engine = rig.engine("d", "decode", TEXT)
    engine.hold_after = 2
    await rig.start(engine)
    asking = asyncio.create_task(complete(rig))
    await until(lambda: engine.adds, "the request at the engine")
    for _ in range(3):
        time.sleep(3 * HEARTBEATS["heartbeat_timeout_s"])  # noqa: ASYNC251 (this is what is tested)
        await asyncio.sleep(0)
    engine.released.set()
    assert await asking == TEXT
    assert rig.metric("baton:request_retries_total", reason="engine_lost") == 0


async def test_new_requests_wait_while_a_group_forms_anew(make_rig: MakeRig):
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=10.0)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(2)]
    await rig.start(*engines)
    for engine in engines:
        engine.retire()
    await rig.connected()
    asking = [asyncio.create_task(complete(rig)) for _ in range(4)]
    await until(lambda: rig.metric("baton:requests_in_flight") == 4, "four requests waiting")
    assert not any(engine.adds for engine in engines)
    engines[0].admit(0, 1)
    assert await asyncio.gather(*asking) == [TEXT] * 4


async def test_new_requests_wait_no_longer_than_configured(make_rig: MakeRig):
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


async def test_a_stream_waits_for_its_group_to_form_anew(make_rig: MakeRig):
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=0.0, resume_wait_s=10.0)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(2)]
    for engine in engines:
        engine.hold_after = 3
    await rig.start(*engines)
    asking = asyncio.create_task(complete(rig))
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 3, "three tokens")
    for engine in engines:
        engine.hold_after = None
        engine.retire()
    await rig.connected()
    await asyncio.wait([asking], timeout=0.2)
    assert not asking.done()
    engines[1].admit(0, 1)
    assert await asking == TEXT


async def test_a_client_that_leaves_the_queue_leaves_nothing(make_rig: MakeRig):
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=10.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    engine.retire()
    await rig.connected()
    asking = asyncio.create_task(complete(rig))
    await until(lambda: rig.metric("baton:requests_in_flight") == 1, "the request waiting")
    asking.cancel()
    await until(lambda: rig.metric("baton:requests_in_flight") == 0, "no request waiting")
    engine.admit(0, 1)
    await rig.connected(engine)
    assert not engine.adds


async def test_a_burst_goes_by_what_heartbeats_said_and_what_was_sent_since(make_rig: MakeRig):
    """Another gateway keeps one engine busier: a burst fills the other up to it first, then both."""
    rig = make_rig(heartbeat_interval_s=0.05)
    busy, idle = (rig.engine(f"d{index}", "decode", TEXT) for index in range(2))
    busy.num_running, idle.num_running = 6, 4
    for engine in (busy, idle):
        engine.hold_after = 0
    await rig.start(busy, idle)
    members = rig.gateway.pool.available("decode")
    await until(lambda: sum(member.load()[0] for member in members) == 10, "their loads known")
    busy.freeze()
    idle.freeze()  # no heartbeat counts the burst twice
    asking = [asyncio.create_task(complete(rig)) for _ in range(6)]
    busy.thaw()
    idle.thaw()
    await until(lambda: len(busy.adds) + len(idle.adds) == 6, "six requests at the engines")
    for engine in (busy, idle):
        engine.hold_after = None
        engine.released.set()
    assert await asyncio.gather(*asking) == [TEXT] * 6
    assert (len(busy.adds), len(idle.adds)) == (2, 4)


@pytest.mark.parametrize("queue_wait_s", [0.0, 0.2])
async def test_a_gateway_that_saw_no_engine_yet_refuses_at_once(
    make_rig: MakeRig, queue_wait_s: float
):
    rig = make_rig(queue_wait_s=queue_wait_s)
    await rig.start()
    with pytest.raises(openai.InternalServerError, match="No decode engine"):
        await complete(rig)
