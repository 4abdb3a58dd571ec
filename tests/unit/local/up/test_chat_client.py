"""The first request to a local cluster."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from baton_local.up.chat_client import AskError, ask
from support.http_server import serving


def stream(*events: object) -> web.RouteDef:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return web.post("/v1/chat/completions", handler)


def chunk(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


async def test_a_response_is_printed_while_it_is_streamed_and_measured() -> None:
    route = stream(chunk("He"), chunk("llo"), {"choices": [], "usage": {"completion_tokens": 2}})
    printed: list[str] = []
    async with serving(route) as port:
        url = f"http://127.0.0.1:{port}"
        answer = await ask(url, "m", "hi", max_tokens=2, on_text=printed.append, timeout_s=10)
    assert printed == ["He", "llo"]
    assert (answer.text, answer.tokens) == ("Hello", 2)
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("route", "complaint"),
    [
        (stream(chunk("half")), "incomplete"),
        (stream(chunk("half"), {"error": {"message": "engine died"}}), "engine died"),
    ],
)
async def test_an_incomplete_stream_is_an_error(route, complaint) -> None:
    async with serving(route) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(AskError, match=complaint):
            await ask(url, "m", "hi", max_tokens=2, on_text=lambda _: None, timeout_s=10)


async def test_a_refused_connection_is_an_error_with_the_address() -> None:
    with pytest.raises(AskError, match=r"http://127\.0\.0\.1:9"):
        await ask(
            "http://127.0.0.1:9", "m", "hi", max_tokens=2, on_text=lambda _: None, timeout_s=10
        )
