"""The HTTP port of the operator, to which any pod may connect."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress

import aiohttp
import pytest

from baton_operator.process.operator_metrics import MAX_CONNECTIONS, Metrics, serve

DEADLINE_S = 30.0


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serve("127.0.0.1", 0, Metrics(), lambda: "") as port:
        yield port


async def answer_to(port: int, request: bytes) -> bytes:
    """Send a request and return all that the server sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    return answer


async def test_the_oldest_connection_is_closed_at_the_limit(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_CONNECTIONS)]
    for reader, _ in opened[:MAX_CONNECTIONS]:
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/health") as response,
    ):
        assert await response.text() == "ok\n"
    for _, writer in opened:
        writer.close()


async def test_a_connection_whose_response_is_not_read_is_closed_at_the_limit(port: int) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    opened = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(3)]
    for _, writer in opened:
        writer.write(request * 1000)
    for _ in range(MAX_CONNECTIONS):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append((_, writer))
    for reader, _ in opened[:3]:
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                # One response, and no answer to the requests after it.
                assert (await reader.read()).count(b"HTTP/1.1 200") <= 1
    for _, writer in opened:
        writer.close()


async def test_a_burst_of_connections_does_not_end_an_earlier_request(port: int) -> None:
    with ExitStack() as closing:

        def connect() -> socket.socket:
            return closing.enter_context(socket.create_connection(("127.0.0.1", port)))

        first = connect()
        first.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(3 * MAX_CONNECTIONS):  # the server accepts none of them yet
            connect()
        reader, _ = await asyncio.open_connection(sock=first)
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).endswith(b"ok\n")


@pytest.mark.parametrize("headers", [b"a: " + b"x" * 5000, b"a: b\r\n" * 40])
async def test_large_heads_are_refused(port: int, headers: bytes) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % headers
    assert (await answer_to(port, request)).startswith(b"HTTP/1.0 400")


async def test_a_body_is_not_read(port: int) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    answer = await answer_to(port, head + b"x" * 1000)
    assert answer.endswith(b"ok\n")
