"""Requests to pods: only bounded, valid replies of the pod itself count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic

import aiohttp
import pytest
from aiohttp import web

from baton_operator.observe import pod_clients
from baton_operator.observe.pod_clients import CoordinatorClient, Drainer
from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import TopologyRequest
from support.http_server import serving


@pytest.mark.parametrize(
    ("status", "body", "unfinished"),
    [
        (200, '{"draining": true, "unfinished": 3}', 3),
        (500, "", None),
        (200, "{}", None),
        (200, "not JSON", None),
    ],
)
async def test_only_a_valid_drain_response_has_a_count(
    status: int, body: str, unfinished: int | None
) -> None:
    async def drain(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type="application/json")

    async with drained_by(drain) as drainer:
        assert await drainer.drain("127.0.0.1") == unfinished


async def test_an_unreachable_engine_gives_no_response() -> None:
    async with aiohttp.ClientSession() as session:
        assert await Drainer(session, port=1).drain("127.0.0.1") is None


@asynccontextmanager
async def drained_by(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[Drainer]:
    routes = web.post("/drain", handler), web.post("/elsewhere", handler)
    async with serving(*routes) as port, aiohttp.ClientSession() as session:
        yield Drainer(session, port=port)


async def test_a_pod_at_a_recycled_address_receives_nothing_that_it_can_send_to_others() -> None:
    """The operator may send a drain to an address that a pod of another namespace now has."""
    key, received = ServiceKey(b"the key of one service"), []

    async def capture(request: web.Request) -> web.Response:
        received.append(request.headers["Authorization"])
        return web.json_response({"unfinished": 0})

    async with drained_by(capture) as drainer:
        assert await drainer.drain("127.0.0.1", key) == 0
    (header,) = received
    assert key.secret("http").hex() not in header
    meant = AdminRequest("POST", "/drain", "127.0.0.1")
    assert key.admits(header, meant)
    for replayed in (
        meant._replace(pod_ip="127.0.0.2"),
        meant._replace(target="/sleep?level=2"),
        AdminRequest("PUT", "/topology"),
    ):
        assert not key.admits(header, replayed), replayed


async def test_a_redirect_of_a_pod_is_not_followed() -> None:
    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(
            status=307, headers={"Location": "/elsewhere"}, text='{"unfinished": 0}'
        )

    async with drained_by(redirect) as drainer:
        assert await drainer.drain("127.0.0.1") is None
    assert asked == ["/drain"]


async def test_only_a_bounded_part_of_a_response_is_read() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**16)
            sent += 2**16

    async with drained_by(endless) as drainer:
        assert await drainer.drain("127.0.0.1") is None
    assert sent < 64 * pod_clients.MAX_BODY_BYTES


async def test_a_silent_address_delays_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_clients, "TIMEOUT_S", 0.2)
    asked = 0

    async def silent(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async with drained_by(silent) as drainer:
        assert [await drainer.drain("127.0.0.1") for _ in range(3)] == [None, None, None]
        assert asked == 1
        monkeypatch.setattr(pod_clients, "monotonic", lambda: monotonic() + pod_clients.SILENT_S)
        await drainer.drain("127.0.0.1")
        assert asked == 2


@pytest.mark.parametrize(
    ("code", "body"),
    [(200, b"{}"), (200, b"no JSON"), (400, b'{"reason": "BadRequest"}'), (503, b"")],
)
async def test_an_invalid_response_is_no_topology(code: int, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=code, body=body)

    routes = web.get("/topology", answer), web.put("/topology", answer)
    async with serving(*routes) as port, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, port=port)
        assert await client.topology("127.0.0.1") is None
        request = TopologyRequest(operation_id="x", members=["a"])
        assert await client.request_topology("127.0.0.1", request) is None


async def test_an_unreachable_coordinator_gives_no_topology() -> None:
    async with aiohttp.ClientSession() as session:
        assert await CoordinatorClient(session, port=1).topology("127.0.0.1") is None
