"""Requests for a data-parallel rank, and groups whose generation changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton_protocol.engine_messages import ErrorCode
from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
GO: dict[str, Any] = {"model": "m", "prompt": "go", "max_tokens": 50}
HEADER = "X-Data-Parallel-Rank"


async def group(rig: GatewayRig, size: int) -> list[FakeEngine]:
    """Start a gateway with a group of this size. Return the engines in rank order."""
    engines = [rig.engine(f"d{rank}", "decode", TEXT) for rank in range(size)]
    for rank, engine in enumerate(engines):
        engine.rank, engine.size = rank, size
    await rig.start(*engines)
    return engines


async def ask(
    rig: GatewayRig, rank: int | None = None, *, header: str | None = None, **fields: Any
) -> tuple[int, Any]:
    body = GO | fields | ({} if rank is None else {"data_parallel_rank": rank})
    headers = {} if header is None else {HEADER: header}
    status, answer, _ = await rig.post("/v1/completions", body, headers=headers)
    return status, answer


@pytest.mark.parametrize("way", ["body", "header", "both"])
async def test_a_request_is_sent_to_the_rank_that_it_names(rig: GatewayRig, way: str) -> None:
    engines = await group(rig, 3)
    for rank in (2, 0, 2, 1, 2):
        header = None if way == "body" else str(rank)
        status, _ = await ask(rig, None if way == "header" else rank, header=header)
        assert status == 200
    assert [len(engine.adds) for engine in engines] == [1, 1, 3]
    assert {request.data_parallel_rank for request in engines[2].adds} == {2}
    await ask(rig)
    assert [r.data_parallel_rank for engine in engines for r in engine.adds].count(None) == 1


async def test_samples_and_chats_are_sent_to_the_rank_that_they_name(rig: GatewayRig) -> None:
    engines = await group(rig, 3)
    assert (await ask(rig, 1, n=3))[0] == 200
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    status, _, _ = await rig.post("/v1/chat/completions", body, headers={HEADER: "1"})
    assert status == 200
    assert [len(engine.adds) for engine in engines] == [0, 4, 0]


@pytest.mark.parametrize(
    ("rank", "header", "param"),
    [
        (3, None, "data_parallel_rank"),
        (-1, None, "data_parallel_rank"),
        (None, "3", "data_parallel_rank"),
        (None, "-1", HEADER),
        (None, "first", HEADER),
        (1, "2", "data_parallel_rank"),
    ],
)
async def test_an_invalid_rank_is_refused(
    rig: GatewayRig, rank: int | None, header: str | None, param: str
) -> None:
    engines = await group(rig, 3)
    status, body = await ask(rig, rank, header=header)
    assert (status, body["error"]["param"]) == (400, param)
    assert not any(engine.adds for engine in engines)


async def test_a_request_waits_for_its_rank_and_then_gets_503(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=0.3)
    engines = await group(rig, 2)
    engines[1].retire()
    await rig.connected(engines[0])
    status, body = await ask(rig, 1)
    assert (status, body["error"]["message"]) == (
        503,
        "Data-parallel rank 1 is not ready; retry later.",
    )
    assert not engines[0].adds


async def test_a_request_for_a_full_rank_is_refused(rig: GatewayRig) -> None:
    engines = await group(rig, 2)
    engines[1].refuse = (ErrorCode.OVERLOADED, "full")
    assert (await ask(rig, 1))[0] == 429
    assert not engines[0].adds


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_request_of_a_lost_rank_is_resumed_on_any_rank(
    rig: GatewayRig, tokens: int
) -> None:
    engines = await group(rig, 2)
    engines[1].hold_after = tokens
    asking = asyncio.create_task(ask(rig, 1))
    await until(lambda: engines[1].adds, "the request at its rank")
    await until(
        lambda: rig.metric("baton:gateway_generation_tokens_total") == tokens, f"{tokens} tokens"
    )
    engines[1].die()
    status, body = await asking
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
    assert [r.data_parallel_rank for r in engines[0].adds] == [None], (
        "the resumed request still names the lost rank"
    )


async def test_rank_numbers_are_those_of_the_latest_generation(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, queue_wait_s=0.3)
    engines = await group(rig, 3)
    engines[0].retire()  # the first of 3 leaves, so the ranks change
    await rig.connected(*engines[1:])
    engines[1].admit(0, 2)
    engines[2].admit(1, 2)
    await until(lambda: rig.gateway.pool.data_parallel_size == 2, "the new size")
    assert (await ask(rig, 0))[0] == 200
    assert (await ask(rig, 1))[0] == 200
    assert (await ask(rig, 2))[0] == 400
    assert [len(engine.adds) for engine in engines] == [0, 1, 1]
    engines[0].admit(2, 3)
    for rank, engine in enumerate(engines[1:]):
        engine.admit(rank, 3)
    await rig.connected(*engines)
    assert (await ask(rig, 2))[0] == 200
    assert [len(engine.adds) for engine in engines] == [1, 1, 1]


async def test_a_standby_rank_gets_no_requests_until_it_is_ready(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05)
    engines = await group(rig, 2)
    engines[0].draining = True  # reported in heartbeats
    await rig.connected(engines[1])
    for _ in range(6):
        assert (await ask(rig))[0] == 200
    assert not engines[0].adds
    engines[0].draining = False
    await rig.connected(*engines)
