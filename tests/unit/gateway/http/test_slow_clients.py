"""Clients that ask for much and read nothing: what is kept for them has a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from aiohttp import web

from baton_gateway.http import generation_endpoint
from baton_gateway.http.event_stream import EventStream
from baton_gateway.http.slow_clients import has_unread_bytes
from baton_gateway.requests import generation
from support.gateway.fake_engine import DEADLINE_S, EOS_ID
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until


async def test_a_stream_that_nobody_reads_is_ended_before_all_of_it_is_kept(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
):
    sent: list[web.Request] = []

    class Remembered(EventStream):
        def __init__(self, http: web.Request, *, is_wanted: bool) -> None:
            super().__init__(http, is_wanted=is_wanted)
            sent.append(http)

    monkeypatch.setattr(generation_endpoint, "EventStream", Remembered)
    monkeypatch.setattr(generation, "MAX_UNREAD_OUTPUTS", 50)
    engine = rig.engine("d", "decode")
    engine.answer, engine.max_model_len, engine.tokens_per_output = [5] * 100_000, 200_000, 50
    engine.hold_after = 50_000  # more than buffers hold; an engine that said all before they are full could not be stopped
    await rig.start(engine)
    body = json.dumps(
        {"model": "m", "prompt": "hi"} | {"max_tokens": 100_000, "stream": True, "logprobs": 20}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(rig.url.rsplit(":", 1)[1])))
        connection.sendall(head % len(body) + body)
        await until(
            lambda: engine.aborts or (sent and has_unread_bytes(sent[0])),
            "buffers full of what the client does not read",
        )
        engine.released.set()
        await until(lambda: engine.aborts, "the engine told to stop")
        await until(lambda: not rig.metric("baton:requests_in_flight"), "the request ended")
    assert rig.metric("baton:gateway_generation_tokens_total") < 100_000
    assert rig.metric("baton:http_requests_total", endpoint="/v1/completions", status="499") == 1


async def test_an_answer_that_nobody_reads_holds_its_place_and_is_forgotten_at_the_deadline(
    make_rig: MakeRig,
):
    rig = make_rig(request_timeout_s=5.0, max_concurrent_requests=1)
    engine = rig.engine("d", "decode")
    engine.max_model_len = 400_000
    await rig.start(engine)
    tokens = [EOS_ID] * 1_200_000
    body = json.dumps({"tokens": tokens}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", int(rig.url.rsplit(":", 1)[1])))
        await asyncio.to_thread(connection.sendall, head % len(body) + body)
        start = await asyncio.to_thread(connection.recv, 12)
        assert start == b"HTTP/1.1 200"
        assert (await rig.post("/detokenize", {"tokens": [5]}))[0] == 429

        async def free() -> bool:
            return (await rig.post("/detokenize", {"tokens": [5]}))[0] == 200

        await until(free, "the place free again")
        assert await asyncio.to_thread(rest_of, connection) < len(tokens) * len("<|endoftext|>")


def rest_of(connection: socket.socket) -> int:
    """Bytes that still come."""
    received = 0
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**20):
            received += len(piece)
    return received
