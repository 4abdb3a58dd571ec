"""Engines that are paused, asleep or stalled get no requests, and lose those that they have."""

from __future__ import annotations

import asyncio

import pytest

from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"


def make_engines(make_rig: MakeRig) -> tuple[GatewayRig, FakeEngine, FakeEngine]:
    rig = make_rig(heartbeat_interval_s=0.05, stall_timeout_s=30.0)
    return rig, rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)


async def begin(rig: GatewayRig, engine: FakeEngine) -> asyncio.Task[str]:
    """Start a request that `engine`, the only one, holds after two tokens."""
    engine.hold_after = 2
    await rig.start(engine)
    running = asyncio.create_task(rig.complete())
    await until(lambda: engine.adds, "the request at the engine")
    return running


async def test_a_paused_engine_gets_no_requests_and_keeps_those_it_has(make_rig: MakeRig):
    rig, paused, other = make_engines(make_rig)
    running = await begin(rig, paused)
    rig.announce(paused, other)
    await rig.connected(paused, other)
    paused.paused = True
    await rig.connected(other)
    for _ in range(4):
        assert await rig.complete() == TEXT
    assert len(paused.adds) == 1
    paused.paused = False
    await rig.connected(paused, other)
    paused.released.set()
    assert await running == TEXT
    assert not paused.aborts


@pytest.mark.parametrize("state", [{"asleep": True, "paused": True}, {"stalled_s": 31.0}])
async def test_requests_of_a_sleeping_or_stalled_engine_continue_elsewhere(
    make_rig: MakeRig, state
):
    rig, stuck, other = make_engines(make_rig)
    running = await begin(rig, stuck)
    for name, value in state.items():
        setattr(stuck, name, value)
    await until(lambda: len(rig.gateway.pool.available("decode")) == 0 or stuck.stalled_s, "PONG")
    assert not running.done(), "moved although no other engine can continue the request"
    rig.announce(stuck, other)
    assert await running == TEXT
    assert other.adds[0].generated_token_ids == stuck.answer[:2]
    assert rig.metric("baton:requests_resumed_total", reason="engine_lost") == 1
    await until(lambda: stuck.num_hellos == 2, "the gateway to connect to the engine again")
    for _ in range(4):
        assert await rig.complete() == TEXT
    assert len(stuck.adds) == 1
    for name, value in {"asleep": False, "paused": False, "stalled_s": 0.0}.items():
        setattr(stuck, name, value)
    await rig.connected(stuck, other)


async def test_an_engine_whose_step_is_slow_gets_requests_only_if_there_is_no_other(
    make_rig: MakeRig,
):
    rig, slow, other = make_engines(make_rig)
    slow.stalled_s = 5.0
    await rig.start(slow)
    assert await rig.complete() == TEXT
    rig.announce(slow, other)
    await rig.connected(slow, other)
    for _ in range(4):
        assert await rig.complete() == TEXT
    assert len(slow.adds) == 1


async def test_requests_do_not_move_from_one_stalled_engine_to_another(make_rig: MakeRig):
    rig, stuck, other = make_engines(make_rig)
    running = await begin(rig, stuck)
    stuck.stalled_s = other.stalled_s = 31.0
    rig.announce(stuck, other)
    await rig.connected(stuck, other)
    await until(
        lambda: all(member.is_slow for member in rig.gateway.pool.available("decode")), "PONGs"
    )
    assert stuck.num_hellos == 1
    stuck.released.set()
    assert await running == TEXT
    assert not other.adds
