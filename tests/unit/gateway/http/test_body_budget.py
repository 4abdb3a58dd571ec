"""Bodies count, have a deadline and are bounded in bytes while they arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from baton_gateway.errors import APIError
from baton_gateway.http import body_budget
from baton_gateway.http.body_budget import BodyBudget, BodyCharge
from baton_gateway.metrics import GatewayMetrics
from support.gateway.fake_engine import DEADLINE_S, EOS_ID
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")
CHARGED = "baton:gateway_body_bytes"


@asynccontextmanager
async def unfinished(
    rig: GatewayRig, num_bytes: int, path: str = "/v1/completions", size: int = 16 * 2**20
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a head that announces `size` bytes, and `num_bytes` of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n".encode()
        + b" " * num_bytes
    )
    try:
        yield reader, writer
    finally:
        writer.close()


async def response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], str]:
    """Return the status, the headers and the error code of a response."""
    async with asyncio.timeout(DEADLINE_S):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        body = json.loads(await reader.readexactly(int(headers["Content-Length"])))
    return int(first.split()[1]), headers, body["error"]["code"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_counts_while_its_body_arrives(make_rig: MakeRig, path: str) -> None:
    rig = make_rig(max_concurrent_requests=2)
    await rig.start(rig.engine("d", "decode", "hello world"))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(unfinished(rig, 100, path))
        await until(lambda: rig.metric(CHARGED) == 200, "both bodies at the gateway")
        # Refused without its body.
        reader, _ = await stack.enter_async_context(unfinished(rig, 0, path))
        status, headers, code = await response(reader)
        assert (status, headers["Retry-After"], code) == (429, "1", "rate_limit_exceeded")
    await until(lambda: rig.metric(CHARGED) == 0, "the bodies of closed connections uncharged")
    assert await rig.complete(n=2) == "hello world"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_bytes", [0, 1000])
async def test_a_body_that_stops_is_refused_at_the_deadline(
    rig: GatewayRig, path: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "BODY_TIMEOUT_S", 0.2)
    await rig.start(rig.engine("d", "decode"))
    async with unfinished(rig, num_bytes, path) as (reader, _):
        status, _, code = await response(reader)
        assert (status, code) == (408, "timeout")
    assert rig.metric(CHARGED) == 0


async def test_a_steady_body_may_take_longer_than_one_that_stops(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "BODY_TIMEOUT_S", 0.4)
    monkeypatch.setattr(body_budget, "MIN_BODY_RATE", 10)
    await rig.start(rig.engine("d", "decode", "hello world"))
    body = json.dumps({"model": "m", "prompt": "go", "max_tokens": 50}).encode()
    async with unfinished(rig, 100, size=100 + len(body)) as (reader, writer):
        await asyncio.sleep(0.8)  # time is the input: twice BODY_TIMEOUT_S
        writer.write(body)
        async with asyncio.timeout(DEADLINE_S):
            assert b"200" in await reader.readline()


async def test_bodies_of_500_clients_stay_within_the_budget(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, held = 2**22, 2**16
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", budget)
    monkeypatch.setattr(body_budget, "BODY_TIMEOUT_S", 600.0)  # the limit of bytes ends them
    await rig.start(rig.engine("d", "decode", "hello world"))
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(500):
            reader, _ = await stack.enter_async_context(unfinished(rig, held))
            readers.append(reader)
            assert rig.metric(CHARGED) <= budget
        refusals = rig.metric
        refused = {"endpoint": "/v1/completions", "status": "503"}
        await until(
            lambda: refusals("baton:http_requests_total", **refused) >= 500 - budget // held,
            "the refusals",
        )
        assert rig.metric(CHARGED) <= budget
        # A small request is served beside them.
        assert await rig.complete() == "hello world"
        # Any of them: their bodies are equally large.
        answers = [asyncio.create_task(response(reader)) for reader in readers]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop().result()
        for answer in waiting:
            answer.cancel()
        assert (first[0], first[1]["Retry-After"], first[2]) == (503, "1", "too_many_bytes")
    await until(lambda: rig.metric(CHARGED) == 0, "the bodies of closed connections uncharged")


async def test_bodies_of_requests_that_wait_for_an_engine_are_charged(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 2**16)
    rig = make_rig(hold_s=60.0)
    await rig.start()
    large = {"model": "m", "prompt": "hello " * 8000, "max_tokens": 1}
    first = asyncio.create_task(rig.post("/v1/completions", large))
    await until(lambda: rig.metric("baton:requests_held") == 1, "the request in the queue")
    assert rig.metric(CHARGED) > 48_000
    larger = large | {"prompt": "hello " * 9000}
    status, body, headers = await rig.post("/v1/completions", larger)
    assert (status, body["error"]["code"]) == (503, "too_many_bytes")
    assert headers["Retry-After"] == "1"
    small = asyncio.create_task(rig.complete())
    await until(lambda: rig.metric("baton:requests_held") == 2, "the small request in the queue")
    engine = rig.engine("d", "decode", "hello world")
    rig.announce(engine)
    assert await small == "hello world"
    assert (await first)[0] == 400, "the prompt is longer than the model's limit"
    assert rig.metric(CHARGED) == 0


async def test_a_body_that_is_announced_as_too_large_is_not_read(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    async with unfinished(rig, 0, size=16 * 2**20 + 1) as (reader, _):
        status, _, code = await response(reader)
        assert (status, code) == (413, "request_too_large")


async def test_a_refused_body_is_not_charged_again_by_a_piece_that_came_in_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 100)
    metrics = GatewayMetrics()
    budget = BodyBudget(metrics, client_limit=1)
    async with budget.charge(None) as small:
        async with budget.charge(None) as large:
            budget.add(large, 90)
            budget.add(small, 20)  # refuses the large one
            with pytest.raises(APIError, match="too large at the moment"):
                budget.add(large, 5)
            large.timeout.reschedule(None)  # the task of the large one has ended
        assert metrics.registry.get_sample_value(CHARGED) == 20


async def test_a_response_larger_than_the_budget_ends_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 100)
    metrics = GatewayMetrics()
    budget = BodyBudget(metrics, client_limit=1)
    async with budget.charge(None) as body, budget.charge(None) as response:
        body.add(99)
        response.add_response(500)
        assert metrics.registry.get_sample_value(CHARGED) == 599
        body.add(1)  # cuts the response off, which is the largest request
        assert metrics.registry.get_sample_value(CHARGED) == 100
        response.timeout.reschedule(None)  # the task of the response has ended


async def test_the_client_with_the_most_bytes_loses_its_largest_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 100)
    metrics = GatewayMetrics()
    budget = BodyBudget(metrics, client_limit=1)
    async with AsyncExitStack() as stack:

        async def charge(client: str, num_bytes: int) -> BodyCharge:
            charge = await stack.enter_async_context(budget.charge(client))
            charge.add(num_bytes)
            return charge

        honest = await charge("honest", 40)
        greedy = [await charge("greedy", num_bytes) for num_bytes in (29, 31)]
        await charge("honest", 10)
        with pytest.raises(APIError, match="too large at the moment"):
            greedy[1].add(1)
        honest.add(20)
        assert metrics.registry.get_sample_value(CHARGED) == 99
        greedy[1].timeout.reschedule(None)  # the task of the request has ended


async def test_a_body_counts_with_its_bytes_and_its_values(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of two letters takes 5 bytes of JSON and 60 bytes of memory."""
    await rig.start(rig.engine("d", "decode", "hello world"))
    body = {"model": "m", "prompt": "hi", "unused": ["aa"] * 20_000}
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 2**20)
    status, answer, _ = await rig.post("/v1/completions", body)
    assert status == 503
    assert "too_many_bytes" in str(answer)
    body["unused"] = ["aa, " * 5 * 20_000]
    assert (await rig.post("/v1/completions", body))[0] == 200


LONG = {"model": "m", "prompt": "hi", "max_tokens": 5000, "logprobs": 20}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", LONG), ("/detokenize", {"tokens": [EOS_ID] * 500_000})],
    ids=["completions", "detokenize"],
)
async def test_a_complete_response_counts_until_it_is_read(
    rig: GatewayRig, path: str, body: dict[str, object]
) -> None:
    engine = rig.engine("d", "decode")
    engine.answer, engine.max_model_len, engine.tokens_per_output = [5] * 5000, 200_000, 500
    await rig.start(engine)
    async with rig.slow_connection(path, body) as connection:
        assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.1 200"
        assert rig.metric(CHARGED) > 2**20
    await until(lambda: rig.metric(CHARGED) == 0, "the closed connection uncharged")


async def test_a_response_that_exceeds_the_budget_while_it_is_sent_is_cut_off(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine("d", "decode")
    engine.max_model_len = 200_000
    await rig.start(engine)
    async with rig.slow_connection("/detokenize", {"tokens": [EOS_ID] * 500_000}) as connection:
        assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.1 200"
        monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 2**16)
        await rig.post("/tokenize", {"prompt": "hi"})
        await until(lambda: rig.metric(CHARGED) == 0, "the unread response dropped")


async def test_a_body_and_its_response_are_not_counted_together(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 2 KB in gzip could become 98 MiB, and end all other requests."""
    engine = rig.engine("d", "decode")
    engine.max_model_len = 200_000
    await rig.start(engine)
    tokens = [EOS_ID] * 20_000
    body = json.dumps({"tokens": tokens}).encode()
    async with unfinished(rig, 2**10):
        await until(lambda: rig.metric(CHARGED) == 2**10, "the body at the gateway")
        budget = 2**14 + len(body) + 64 * len(tokens)
        monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", budget)
        headers = {"Content-Type": "application/json"}
        status, answer, _ = await rig.post("/detokenize", body, headers=headers)
        assert (status, len(answer["prompt"]) > 2**16) == (200, True)
        assert rig.metric(CHARGED) == 2**10, "the other body was dropped"


async def test_a_finished_response_and_bodies_that_arrive_do_not_end_each_other(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine("d", "decode")
    engine.answer, engine.max_model_len, engine.tokens_per_output = [5] * 5000, 200_000, 500
    await rig.start(engine)
    async with unfinished(rig, 2**19):
        await until(lambda: rig.metric(CHARGED) == 2**19, "the body at the gateway")
        monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 2**20)
        status, answer, _ = await rig.post("/v1/completions", LONG)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5000)
        assert rig.metric(CHARGED) == 2**19, "the body was dropped"
