"""A service scaled to zero: requests are held, within limits, until an engine is ready."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton_gateway import errors
from baton_gateway.access import scale_from_zero_queue
from baton_gateway.routing.file_discovery import FileDiscovery
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session
from support.waiting import until

TEXT = "hello world, the quick brown fox"
BODY = {"model": "m", "prompt": "go", "max_tokens": 50}
HELD = "baton:requests_held"


async def stream(rig: GatewayRig) -> str:
    chunks = await rig.client().completions.create(**BODY, stream=True)
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def test_requests_without_an_engine_are_held_until_one_is_ready(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(hold_s=30.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    assert (await rig.get("/ready"))[0] == 200
    assert (await rig.get("/v1/models"))[0] == 200
    requests = [asyncio.create_task(coroutine) for coroutine in (rig.complete(), stream(rig))]
    await until(lambda: rig.metric(HELD) == 2, "two requests held")
    rig.announce(engine)
    assert await asyncio.gather(*requests) == [TEXT, TEXT]
    assert rig.metric(HELD) == 0


async def test_requests_are_held_again_after_the_engines_left(make_rig: MakeRig) -> None:
    rig = make_rig(hold_s=30.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    assert await rig.complete() == TEXT
    rig.announce()
    await rig.connected()
    requests = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric(HELD) == 1, "the request held")
    assert (await rig.get("/ready"))[0] == 200
    rig.announce(engine)
    assert await requests == TEXT


async def test_the_number_of_held_requests_is_limited(make_rig: MakeRig) -> None:
    rig = make_rig(hold_s=30.0, max_held_requests=2)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    requests = [asyncio.create_task(rig.complete()) for _ in range(2)]
    await until(lambda: rig.metric(HELD) == 2, "two requests held")
    status, body, headers = await rig.post("/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert int(headers["Retry-After"]) == errors.NO_ENGINE_RETRY_AFTER_S
    rig.announce(engine)
    assert await asyncio.gather(*requests) == [TEXT, TEXT]


@pytest.mark.parametrize("streamed", [False, True])
async def test_held_time_does_not_count_for_the_request_timeout(
    make_rig: MakeRig, streamed: bool
) -> None:
    rig = make_rig(hold_s=30.0, request_timeout_s=1.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    request = asyncio.create_task(stream(rig) if streamed else rig.complete())
    await until(lambda: rig.metric(HELD) == 1, "the request held")
    timeout_at = time.monotonic() + 1.0
    await until(lambda: time.monotonic() > timeout_at, "the request held for its timeout")
    rig.announce(engine)
    assert await request == TEXT


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_is_held_no_longer_than_hold_s(make_rig: MakeRig, streamed: bool) -> None:
    rig = make_rig(hold_s=0.3)
    await rig.start()
    status, body, headers = await rig.post("/v1/completions", {**BODY, "stream": streamed})
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert int(headers["Retry-After"]) > 0
    assert rig.metric(HELD) == 0


async def test_an_invalid_request_is_refused_and_not_held(make_rig: MakeRig) -> None:
    rig = make_rig(hold_s=30.0)
    await rig.start()
    assert (await rig.post("/v1/completions", {**BODY, "model": "other"}))[0] == 404
    assert (await rig.post("/v1/completions", {**BODY, "max_tokens": -1}))[0] == 400
    assert rig.metric(HELD) == 0


async def test_a_request_is_removed_from_the_queue_when_its_client_disconnects(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(hold_s=30.0)
    await rig.start()
    requests = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric(HELD) == 1, "the request held")
    requests.cancel()
    await until(lambda: rig.metric(HELD) == 0, "no request held")


async def test_a_held_stream_gets_keep_alive_comments(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_from_zero_queue, "KEEP_ALIVE_S", 0.05)
    rig = make_rig(hold_s=30.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    async with http_session() as session:
        requests = asyncio.create_task(stream(rig))
        async with session.post(
            f"{rig.url}/v1/completions", json={**BODY, "stream": True}
        ) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert (await response.content.readline()).startswith(b":")
            rig.announce(engine)
            rest = (await response.read()).decode()
    assert '"finish_reason":"length"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert await requests == TEXT


async def test_a_held_stream_with_keep_alive_comments_ends_with_an_error_event(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_from_zero_queue, "KEEP_ALIVE_S", 0.05)
    rig = make_rig(hold_s=0.5)
    await rig.start()
    body = {**BODY, "stream": True}
    async with (
        http_session() as session,
        session.post(f"{rig.url}/v1/completions", json=body) as response,
    ):
        *_, last = [line async for line in response.content if line.strip()]
    assert response.status == 200
    assert last.startswith(b'data: {"error":')
    assert b"no_ready_engine" in last
    assert rig.metric("baton:http_requests_total", endpoint="/v1/completions", status="503") == 1


async def test_held_requests_fail_when_the_gateway_stops(make_rig: MakeRig) -> None:
    rig = make_rig(hold_s=30.0, drain_timeout_s=0.1)
    await rig.start()
    requests = asyncio.create_task(rig.post("/v1/completions", BODY))
    await until(lambda: rig.metric(HELD) == 1, "the request held")
    await rig.gateway.stop()
    status, body, _ = await requests
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")


@pytest.fixture
def scaled_to_zero_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDiscovery, "is_scaled_to_zero", True)


@pytest.mark.usefixtures("scaled_to_zero_by_hand")
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_service_scaled_to_zero_by_hand_refuses_at_once(
    make_rig: MakeRig, streamed: bool
) -> None:
    rig = make_rig(queue_wait_s=600.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    assert await rig.complete() == TEXT
    rig.announce()
    await rig.connected()
    status, body, headers = await rig.post("/v1/completions", {**BODY, "stream": streamed})
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert "scaled to zero" in body["error"]["message"]
    assert int(headers["Retry-After"]) == errors.SCALED_TO_ZERO_RETRY_AFTER_S


@pytest.mark.usefixtures("scaled_to_zero_by_hand")
async def test_a_new_gateway_of_a_service_scaled_to_zero_by_hand_is_ready(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(queue_wait_s=600.0)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    assert (await rig.get("/ready"))[0] == 200
    _, body, _ = await rig.post("/v1/completions", BODY)
    assert "scaled to zero" in body["error"]["message"]
    monkeypatch.setattr(FileDiscovery, "is_scaled_to_zero", False)
    assert (await rig.get("/ready"))[0] == 200, "it must stay ready while the first engine starts"
    request = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric(HELD) == 1, "the request held until the first engine")
    rig.announce(engine)
    assert await request == TEXT


@pytest.mark.usefixtures("scaled_to_zero_by_hand")
async def test_an_engine_that_is_left_serves_a_service_scaled_to_zero_by_hand(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    await rig.start(rig.engine("d", "decode", TEXT))
    assert await rig.complete() == TEXT


async def test_without_hold_s_requests_are_held_only_until_the_first_engine(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(queue_wait_s=600.0, max_held_requests=2)
    engine = rig.engine("d", "decode", TEXT)
    await rig.start()
    assert (await rig.get("/ready"))[0] == 503
    requests = [asyncio.create_task(coroutine) for coroutine in (rig.complete(), stream(rig))]
    await until(lambda: rig.metric(HELD) == 2, "two requests held")
    rig.announce(engine)
    assert await asyncio.gather(*requests) == [TEXT, TEXT]
    rig.announce()
    await rig.connected()
    requests = [asyncio.create_task(rig.complete()) for _ in range(3)]
    await until(lambda: rig.metric("baton:requests_in_flight") == 3, "three requests waiting")
    assert rig.metric(HELD) == 0
    rig.announce(engine)
    assert await asyncio.gather(*requests) == [TEXT] * 3
