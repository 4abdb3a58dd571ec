"""Paused, sleeping and stalled engines get no new requests. A sleep or a stall moves requests.

If the wait for the next token has a limit, sequences that exceed it also move.
"""

from __future__ import annotations

import asyncio

import openai
import pytest

from baton_gateway.routing import engine_pool
from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import NO_TIMEOUT, GatewayRig, MakeRig
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


async def test_a_paused_engine_gets_no_requests_and_keeps_those_it_has(make_rig: MakeRig) -> None:
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
) -> None:
    rig, stuck, other = make_engines(make_rig)
    running = await begin(rig, stuck)
    for name, value in state.items():
        setattr(stuck, name, value)
    await until(
        lambda: all(member.is_slow for member in rig.gateway.pool.available("decode")),
        "the state in a PONG",
    )
    assert not running.done(), "moved although no other engine can continue the request"
    rig.announce(stuck, other)
    assert await running == TEXT
    assert other.adds[0].generated_token_ids == stuck.answer[:2]
    assert rig.metric("baton:requests_resumed_total", reason="engine_lost") == 1
    await until(lambda: len(stuck.aborts) == 1, "the request aborted")
    for _ in range(4):
        assert await rig.complete() == TEXT
    assert len(stuck.adds) == 1
    for name, value in {"asleep": False, "paused": False, "stalled_s": 0.0}.items():
        setattr(stuck, name, value)
    await rig.connected(stuck, other)


async def test_a_sequence_without_tokens_leaves_an_engine_that_makes_progress(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, inter_token_timeout_s=0.3)
    slow, other = rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)
    running = await begin(rig, slow)
    rig.announce(slow, other)
    assert await running == TEXT
    assert other.adds[0].generated_token_ids == slow.answer[:2]
    await until(lambda: len(slow.aborts) == 1, "the request aborted")
    assert rig.metric("baton:requests_resumed_total", reason="no_token") == 1
    assert rig.metric("baton:requests_resumed_total", reason="engine_lost") == 0


async def test_without_another_engine_a_sequence_without_tokens_fails(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(inter_token_timeout_s=0.3, resume_wait_s=0.2)
    running = await begin(rig, rig.engine("d0", "decode", TEXT))
    with pytest.raises(openai.InternalServerError, match=r"did not finish it, and no other"):
        await running
    assert "no token within 0.3 s" in caplog.text


async def test_the_time_to_the_first_token_has_no_limit(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, inter_token_timeout_s=60.0)
    engine = rig.engine("d0", "decode", TEXT, hold_after=0)
    await answer_after_an_hour(rig, engine, monkeypatch)


async def test_the_time_to_the_first_token_after_a_move_has_no_limit(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, inter_token_timeout_s=0.3)
    slow, other = rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)
    slow.hold_after = other.hold_after = 2
    await rig.start(slow)
    running = asyncio.create_task(complete_without_timeout(rig))
    await until(lambda: slow.adds, "the request at the first engine")
    rig.announce(slow, other)
    await until(lambda: other.adds, "the request at the second engine")
    await rig.skip(3600.0, monkeypatch)
    assert not other.aborts
    other.released.set()
    assert await running == TEXT


async def test_the_time_to_the_first_token_after_a_prefill_stage_has_no_limit(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, inter_token_timeout_s=0.3)
    prefill = rig.engine("p", "prefill", TEXT)
    decode = rig.engine("d", "decode", TEXT, hold_after=1)
    await rig.start(prefill, decode)
    running = asyncio.create_task(complete_without_timeout(rig))
    await until(lambda: decode.prefill_results, "the first token at the decode engine")
    await rig.skip(3600.0, monkeypatch)
    assert not decode.aborts
    decode.released.set()
    assert await running == TEXT


async def test_the_time_between_tokens_has_no_limit_by_default(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05)
    engine = rig.engine("d0", "decode", TEXT, hold_after=2)
    await answer_after_an_hour(rig, engine, monkeypatch)


async def answer_after_an_hour(
    rig: GatewayRig, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release `engine` an hour after it has the request, and check the response."""
    await rig.start(engine)
    running = asyncio.create_task(complete_without_timeout(rig))
    await until(lambda: engine.adds, "the request at the engine")
    await rig.skip(3600.0, monkeypatch)
    assert not engine.aborts
    engine.released.set()
    assert await running == TEXT


async def complete_without_timeout(rig: GatewayRig) -> str:
    """Return the text of a completion, which `GatewayRig.skip` does not end."""
    body = {"model": "m", "prompt": "go", "max_tokens": 50}
    _, answer, _ = await rig.post("/v1/completions", body, timeout=NO_TIMEOUT)
    return answer["choices"][0]["text"]


async def test_an_engine_whose_step_is_slow_gets_requests_only_if_there_is_no_other(
    make_rig: MakeRig,
) -> None:
    rig, slow, other = make_engines(make_rig)
    slow.stalled_s = 5.0
    await rig.start(slow)
    assert await rig.complete() == TEXT
    rig.announce(slow, other)
    await rig.connected(slow, other)
    for _ in range(4):
        assert await rig.complete() == TEXT
    assert len(slow.adds) == 1


@pytest.mark.parametrize("reason", ["other stalled", "other hash", "long steps"])
async def test_requests_stay_if_no_other_engine_is_better(make_rig: MakeRig, reason: str) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, stall_timeout_s=30.0)
    stuck = rig.engine("d0", "decode", TEXT)
    compatibility_hash = "other" if reason == "other hash" else stuck.compatibility_hash
    other = rig.engine("d1", "decode", TEXT, compatibility_hash=compatibility_hash)
    running = await begin(rig, stuck)
    stuck.stalled_s = 31.0
    stuck.longest_step_s = 16.0 if reason == "long steps" else 0.0
    other.stalled_s = 31.0 if reason == "other stalled" else 0.0
    rig.announce(stuck, other)
    await rig.connected(stuck, other)
    [member] = [each for each in rig.gateway.pool.available("decode") if each.endpoint.name == "d0"]
    await until(lambda: member.is_slow, "the stall in a PONG")
    seen = member.ready_client.status.sequence
    await until(lambda: member.ready_client.status.sequence > seen + 6, "PONGs for 0.3 s")
    assert not stuck.aborts
    stuck.released.set()
    assert await running == TEXT
    assert not other.adds


async def test_requests_do_not_stay_on_a_stalled_engine_without_end(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, resume_wait_s=0.2)
    stuck = rig.engine("d0", "decode", TEXT)
    running = await begin(rig, stuck)
    stuck.stalled_s = engine_pool.MAX_STALL_S + 1
    with pytest.raises(openai.InternalServerError, match="no other took it over"):
        await running
    assert len(stuck.aborts) == 1


async def test_requests_may_return_to_an_engine_that_makes_progress_again(
    make_rig: MakeRig,
) -> None:
    rig, first, second = make_engines(make_rig)
    running = await begin(rig, first)
    second.hold_after = 2
    first.stalled_s = 31.0
    rig.announce(first, second)
    await until(lambda: second.adds, "the request at the second engine")
    first.stalled_s, first.hold_after = 0.0, None
    first.released.set()
    await until(
        lambda: not any(member.is_slow for member in rig.gateway.pool.available("decode")),
        "the first engine to make progress",
    )
    second.stalled_s = 31.0
    assert await running == TEXT
    assert len(first.adds) == 2
    generated = first.adds[1].generated_token_ids
    assert generated == first.answer[: len(generated)]
