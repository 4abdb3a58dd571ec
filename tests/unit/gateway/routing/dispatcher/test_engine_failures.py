"""Engines that refuse requests, die or send wrong offsets: fallbacks and errors."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from baton_protocol.engine_messages import ErrorCode
from support.gateway.fake_engine import DEADLINE_S, FakeEngine
from support.gateway.gateway_rig import NO_TIMEOUT, GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL])
async def test_decode_takes_over_from_a_prefill_engine_that_refuses(
    rig: GatewayRig, code: ErrorCode
) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    prefill.refuse = (code, "not now")
    await rig.start(prefill, decode)
    assert await rig.complete() == TEXT
    [result] = decode.prefill_results.values()
    assert (result.token_ids, result.error) == ([], "not now")
    outcome = "failed" if code is ErrorCode.INTERNAL else "refused"
    assert rig.metric("baton:prefill_fallbacks_total", reason=outcome) == 1


async def test_decode_takes_over_from_a_prefill_engine_that_dies(rig: GatewayRig) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    prefill.die_on_add = True
    await rig.start(prefill, decode)
    assert await rig.complete() == TEXT
    [result] = decode.prefill_results.values()
    assert not result.token_ids
    assert result.error
    await rig.connected(decode)
    assert await rig.complete() == TEXT
    assert decode.adds[-1].kv_transfer is None
    assert rig.metric("baton:prefill_fallbacks_total", reason="no_ready_engine") == 1


async def test_decode_takes_over_from_a_prefill_engine_without_progress(make_rig: MakeRig) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, stall_timeout_s=30.0)
    prefill = rig.engine("p", "prefill", TEXT, hold_after=0)
    decode = rig.engine("d", "decode", TEXT, hold_after=3)
    await rig.start(prefill, decode)
    answer = asyncio.create_task(rig.complete())
    await until(lambda: prefill.adds, "the request at the prefill engine")
    prefill.stalled_s = 31.0  # it still responds to PINGs
    await until(lambda: prefill.aborts, "the abort of the prefill stage while decode runs")
    decode.released.set()
    assert await answer == TEXT
    [result] = decode.prefill_results.values()
    assert not result.token_ids
    assert "no progress for 31 s" in result.error
    assert rig.metric("baton:prefill_stages_total", outcome="failed") == 1


async def test_prompts_wait_for_an_overloaded_prefill_engine_as_long_as_it_makes_progress(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05)
    prefill = rig.engine("p", "prefill", TEXT, hold_after=0)
    decode = rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    body = {"model": "m", "prompt": "go", "max_tokens": 50}
    answers = [
        asyncio.create_task(rig.post("/v1/completions", body, timeout=NO_TIMEOUT))
        for _ in range(12)
    ]
    await until(lambda: len(prefill.adds) == 12, "all requests at the prefill engine")
    await rig.skip(3600.0, monkeypatch)
    assert not decode.prefill_results
    prefill.released.set()
    texts = [answer["choices"][0]["text"] for _, answer, _ in await asyncio.gather(*answers)]
    assert texts == [TEXT] * 12
    assert all(result.token_ids for result in decode.prefill_results.values())
    assert rig.metric("baton:prefill_stages_total", outcome="done") == 12


@pytest.mark.parametrize(
    "code", [ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.KV_LOAD]
)
async def test_another_decode_engine_replaces_one_that_refuses(
    rig: GatewayRig, code: ErrorCode
) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    bad, good = rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)
    bad.refuse = (code, "not now")
    await rig.start(prefill, bad, good)
    async with asyncio.timeout(DEADLINE_S):
        while not bad.adds:  # the choice among idle engines is random
            assert await rig.complete() == TEXT
    assert rig.metric("baton:request_retries_total", reason=code.name.lower()) == 1


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (ErrorCode.DRAINING, 503, "service_unavailable"),
        (ErrorCode.OVERLOADED, 429, "rate_limit_exceeded"),
    ],
)
async def test_when_every_decode_engine_refuses_the_client_gets_retry_after(
    rig: GatewayRig, code: ErrorCode, status: int, reason: str
) -> None:
    engines = [rig.engine(f"d{i}", "decode") for i in range(2)]
    for engine in engines:
        engine.refuse = (code, "not now")
    await rig.start(*engines)
    got, body, headers = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (got, body["error"]["code"]) == (status, reason)
    assert int(headers["Retry-After"]) > 0
    assert all(len(engine.adds) == 1 for engine in engines)


async def test_a_request_that_an_engine_calls_invalid_is_a_client_error(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    engine.refuse = (ErrorCode.INVALID, "logit_bias: token 5000 is outside the vocabulary")
    await rig.start(engine)
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        await rig.complete()


async def die_after(
    rig: GatewayRig, engines: list[FakeEngine], tokens: int
) -> tuple[FakeEngine, asyncio.Task[str]]:
    """Stream a request whose decode engine dies after `tokens` tokens.

    Return the engine and a task that reads the client's text.
    """
    for engine in engines:
        engine.hold_after = tokens

    async def read() -> str:
        stream = await rig.client().completions.create(
            model="m", prompt="go", max_tokens=50, seed=3, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    reading = asyncio.create_task(read())
    busy = await until(
        lambda: next((engine for engine in engines if engine.adds), None),
        "the request at an engine",
    )
    await until(
        lambda: rig.metric("baton:gateway_generation_tokens_total") == tokens,
        f"{tokens} tokens at the gateway",
    )
    for engine in engines:
        engine.hold_after = None
    busy.die()
    return busy, reading


@pytest.mark.parametrize(
    ("with_prefill", "tokens"), [(True, 1), (True, 5), (False, 0), (False, 1), (False, 5)]
)
async def test_a_request_of_a_dead_decode_engine_is_resumed_on_another(
    rig: GatewayRig, with_prefill: bool, tokens: int
) -> None:
    engines = [rig.engine(f"d{i}", "decode", TEXT) for i in range(2)]
    prefill = [rig.engine("p", "prefill", TEXT)] if with_prefill else []
    await rig.start(*prefill, *engines)
    dead, reading = await die_after(rig, engines, tokens)
    assert await reading == TEXT
    [survivor] = [engine for engine in engines if engine is not dead]
    [request] = survivor.adds
    assert request.generated_token_ids == survivor.answer[:tokens]
    assert (request.sampling_params.seed, request.sample_index) == (3, 0)
    assert rig.metric("baton:request_retries_total", reason="engine_lost") == 1


async def test_prefill_is_repeated_when_decode_dies_before_the_first_token(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT, hold_after=0)
    engines = [rig.engine(f"d{i}", "decode", TEXT) for i in range(2)]
    await rig.start(prefill, *engines)
    dead, reading = await die_after(rig, engines, 0)
    await until(lambda: len(prefill.adds) == 2, "a second prefill stage")
    assert prefill.aborts == [prefill.adds[0].request_id]
    prefill.released.set()
    assert await reading == TEXT
    transfers = {request.kv_transfer.transfer_id for request in prefill.adds}
    assert len(transfers) == 2, "two attempts share a transfer id"
    assert dead.instance_id not in prefill.adds[1].kv_transfer.peer_instance_id


async def test_a_stream_waits_for_the_restart_of_its_only_decode_engine(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    _, reading = await die_after(rig, [engine], 4)
    await rig.connected()
    successor = rig.engine("d", "decode", TEXT, port=engine.port)
    assert await reading == TEXT
    assert successor.adds[0].generated_token_ids == engine.answer[:4]
    assert rig.metric("baton:requests_resumed_total", reason="engine_lost") == 1


async def test_a_request_is_resumed_only_on_an_engine_with_the_same_compatibility_hash(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(resume_wait_s=1.0)
    engine = rig.engine("d", "decode", TEXT, compatibility_hash="old")
    await rig.start(engine)
    _, reading = await die_after(rig, [engine], 4)
    await rig.connected()
    other = rig.engine("d", "decode", TEXT, port=engine.port, compatibility_hash="new")
    await rig.connected(other)
    with pytest.raises(openai.APIError, match="no other took it over"):
        await reading
    assert not other.adds


async def test_a_stream_that_cannot_be_resumed_ends_with_an_error_event(make_rig: MakeRig) -> None:
    rig = make_rig(resume_wait_s=0.5)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    _, reading = await die_after(rig, [engine], 4)
    with pytest.raises(openai.APIError, match="no other took it over"):
        await reading
    await until(
        lambda: (
            rig.metric("baton:http_requests_total", endpoint="/v1/completions", status="503") == 1
        ),
        "the failure counted",
    )


@pytest.mark.parametrize(("shift", "kind"), [(1, "gap"), (-1, "repeat")])
async def test_a_gap_or_a_repeat_in_the_tokens_is_an_error(
    rig: GatewayRig, shift: int, kind: str
) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    decode.offset_error = shift
    await rig.start(prefill, decode)
    with pytest.raises(openai.InternalServerError, match=kind):
        await rig.complete()
    assert rig.metric("baton:token_offset_errors_total") == 1


@pytest.mark.parametrize("other", [{"compatibility_hash": "other"}, {"kv_transport": "tcp"}])
async def test_engines_that_cannot_exchange_kv_blocks_are_not_paired(
    rig: GatewayRig, other: dict[str, str]
) -> None:
    prefill = rig.engine("p", "prefill", TEXT, **other)
    decode = rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    assert await rig.complete() == TEXT
    assert not prefill.adds
    assert decode.adds[0].kv_transfer is None
    assert rig.metric("baton:engine_pair_mismatches_total") == 1
    assert rig.metric("baton:prefill_fallbacks_total", reason="no_compatible_engine") == 1


async def test_a_request_that_times_out_is_aborted(make_rig) -> None:
    rig = make_rig(request_timeout_s=1.0)  # long enough to reach the engine
    engine = rig.engine("d", "decode", TEXT, hold_after=2)
    await rig.start(engine)
    status, body, _ = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (status, body["error"]["code"]) == (504, "timeout")
    with pytest.raises(openai.APIError, match="did not end within"):
        async for _ in await rig.client().completions.create(model="m", prompt="go", stream=True):
            pass
    await until(lambda: len(engine.aborts) == 2, "both requests aborted")


async def test_too_many_concurrent_sequences_get_429(make_rig) -> None:
    rig = make_rig(max_concurrent_requests=2)
    engine = rig.engine("d", "decode", TEXT, hold_after=0)
    await rig.start(engine)
    running = asyncio.create_task(rig.complete(n=2))
    await until(lambda: len(engine.adds) == 2, "two sequences at the engine")
    status, body, headers = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert "Retry-After" in headers
    engine.released.set()
    assert await running == TEXT
    status, body, _ = await rig.post("/v1/completions", {"model": "m", "prompt": "go", "n": 3})
    assert (status, body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("queue_wait_s", [0.0, 0.3])
async def test_without_a_first_decode_engine_requests_wait_no_longer_than_queue_wait_s(
    make_rig: MakeRig, queue_wait_s: float
) -> None:
    rig = make_rig(queue_wait_s=queue_wait_s)
    await rig.start(rig.engine("p", "prefill"))
    assert (await rig.get("/ready"))[0] == 503
    began = time.monotonic()
    status, body, headers = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert queue_wait_s <= time.monotonic() - began < 5.0
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert "Retry-After" in headers


async def test_a_stopping_gateway_finishes_streams_and_refuses_new_requests(
    rig: GatewayRig,
) -> None:
    engine = rig.engine("d", "decode", TEXT, hold_after=3)
    await rig.start(engine)
    assert (await rig.get("/ready"))[0] == 200
    running = asyncio.create_task(rig.complete())
    await until(lambda: engine.adds, "the request at the engine")
    stopping = asyncio.create_task(rig.gateway.stop())

    async def is_not_ready() -> bool:
        return (await rig.get("/ready"))[0] == 503

    await until(is_not_ready, "/ready to answer 503")
    status, body, _ = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (status, body["error"]["code"]) == (503, "draining")
    engine.released.set()
    assert await running == TEXT
    await stopping


async def test_streams_that_outlast_the_drain_timeout_get_an_error(make_rig) -> None:
    rig = make_rig(drain_timeout_s=0.2)
    engine = rig.engine("d", "decode", TEXT, hold_after=3)
    await rig.start(engine)
    stream = await rig.client().completions.create(model="m", prompt="go", stream=True)
    await anext(aiter(stream))
    stopping = asyncio.create_task(rig.gateway.stop())
    with pytest.raises(openai.APIError, match="shut down"):
        async for _ in stream:
            pass
    await stopping
