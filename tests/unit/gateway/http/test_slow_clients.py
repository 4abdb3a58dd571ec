"""Clients that do not read their responses: buffers are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest
from aiohttp import web

from baton_gateway.endpoints import generation_endpoint
from baton_gateway.http import slow_clients
from baton_gateway.http.event_stream import EventStream
from baton_gateway.http.listener import MAX_UNSENT_BYTES
from baton_gateway.http.slow_clients import has_unread_bytes
from support.gateway.fake_engine import EOS_ID
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until


@pytest.mark.parametrize(
    ("name", "limit"), [("MAX_UNREAD_OUTPUTS", 50), ("MAX_UNREAD_LOGPROBS", 2500 * 21)]
)
async def test_a_stream_that_is_not_read_is_ended_before_it_is_buffered_completely(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    sent: list[web.Request] = []
    kernel_limits: list[int] = []

    class RecordedStream(EventStream):
        def __init__(self, http: web.Request, **options: Any) -> None:
            super().__init__(http, **options)
            sent.append(http)
            kernel_socket = http.get_extra_info("socket")
            kernel_limits.append(
                kernel_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            )

    monkeypatch.setattr(generation_endpoint, "EventStream", RecordedStream)
    monkeypatch.setattr(slow_clients, name, limit)
    engine = rig.engine("d", "decode")
    engine.answer, engine.max_model_len, engine.tokens_per_output = [5] * 100_000, 200_000, 50
    # More than the buffers hold. Otherwise the engine could finish before they are full.
    engine.hold_after = 50_000
    await rig.start(engine)
    body = {"model": "m", "prompt": "hi", "max_tokens": 100_000, "stream": True, "logprobs": 20}
    async with rig.slow_connection("/v1/completions", body):
        await until(
            lambda: engine.aborts or (sent and has_unread_bytes(sent[0])),
            "buffers full of what the client does not read",
        )
        engine.released.set()
        await until(lambda: engine.aborts, "the abort at the engine")
        await until(lambda: not rig.metric("baton:requests_in_flight"), "the request ended")
    assert kernel_limits == [MAX_UNSENT_BYTES]
    assert rig.metric("baton:gateway_generation_tokens_total") < 100_000
    assert rig.metric("baton:http_requests_total", endpoint="/v1/completions", status="499") == 1


async def run_unread_request(rig: GatewayRig, *, streamed: bool) -> None:
    """Send a request for 20,000 tokens, read nothing, and wait until the gateway has ended it."""
    decode = rig.engine("d", "decode")
    decode.answer, decode.max_model_len, decode.tokens_per_output = [5] * 20_000, 30_000, 50
    await rig.start(decode)
    body = {"model": "m", "prompt": "go", "max_tokens": 20_000, "stream": streamed, "logprobs": 10}
    async with rig.slow_connection("/v1/completions", body):
        await until(lambda: rig.metric("baton:requests_in_flight"), "the request at the gateway")
        await until(lambda: not rig.metric("baton:requests_in_flight"), "the end of the request")


async def test_a_stream_that_is_not_read_is_ended_at_the_deadline(make_rig: MakeRig) -> None:
    rig = make_rig(request_timeout_s=2.0)
    await run_unread_request(rig, streamed=True)
    assert rig.metric("baton:http_requests_total", endpoint="/v1/completions", status="200") == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_is_not_read_is_ended_without_a_request_timeout(
    make_rig: MakeRig, streamed: bool
) -> None:
    rig = make_rig(request_timeout_s=0.0, client_timeout_s=3.0)
    await run_unread_request(rig, streamed=streamed)
    assert rig.metric("baton:gateway_generation_tokens_total") == 20_000


async def test_a_client_may_wait_longer_than_its_timeout_for_an_answer(make_rig: MakeRig) -> None:
    rig = make_rig(request_timeout_s=0.0, client_timeout_s=0.3)
    decode = rig.engine("d", "decode", "hello world", hold_after=2)
    await rig.start(decode)
    answer = asyncio.create_task(rig.complete())
    await until(lambda: decode.adds, "the request at the engine")
    released_at = time.monotonic() + 0.6
    await until(lambda: time.monotonic() > released_at, "twice the client's timeout")
    decode.released.set()
    assert await answer == "hello world"


async def test_a_response_that_is_not_read_counts_as_running_until_the_timeout(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(client_timeout_s=5.0, max_concurrent_requests=1)
    engine = rig.engine("d", "decode")
    engine.max_model_len = 400_000
    await rig.start(engine)
    tokens = [EOS_ID] * 1_200_000
    async with rig.slow_connection("/detokenize", {"tokens": tokens}) as connection:
        start = await asyncio.to_thread(connection.recv, 12)
        assert start == b"HTTP/1.1 200"
        assert (await rig.post("/detokenize", {"tokens": [5]}))[0] == 429

        async def is_accepted() -> bool:
            return (await rig.post("/detokenize", {"tokens": [5]}))[0] == 200

        await until(is_accepted, "another request to be accepted")
        assert await asyncio.to_thread(rest_of, connection) < len(tokens) * len("<|endoftext|>")


def rest_of(connection: socket.socket) -> int:
    """Return the number of bytes until the connection ends."""
    received = 0
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**20):
            received += len(piece)
    return received
