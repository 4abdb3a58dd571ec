"""Members observed from pods, and the responses of engines to POST /drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton_kube.client import Object
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.names import ANNOTATION_DRAIN_STARTED
from baton_operator.observe import pod_clients
from baton_operator.observe.observation import member, read_together
from baton_operator.observe.pod_clients import Drainer
from baton_protocol.service_key import AdminRequest, ServiceKey
from support.http_server import serving
from support.operator.services import pod


def running(**container: Any) -> Object:
    observed = pod("demo-decode-12", ready=True)
    observed["status"]["podIP"] = "127.0.0.1"
    observed["status"]["containerStatuses"][0] |= container
    return observed


def test_a_member_is_read_from_its_pod() -> None:
    observed = running(started=True)
    seen = member(observed)
    assert (seen.name, seen.ordinal, seen.revision) == ("demo-decode-12", 12, "new")
    assert seen.ready
    assert seen.serving
    assert not seen.draining


def test_drain_marks_are_read_and_invalid_ones_are_ignored() -> None:
    observed = pod(draining=True)
    observed["metadata"]["annotations"][ANNOTATION_DRAIN_STARTED] = "2026-01-02T03:04:05+00:00"
    assert member(observed).drain_started == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    observed["metadata"]["annotations"][ANNOTATION_DRAIN_STARTED] = "yesterday"
    assert member(observed).draining
    assert member(observed).drain_started is None


def test_a_terminating_pod_is_not_ready() -> None:
    observed = running(started=True)
    observed["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert not member(observed).ready
    assert member(observed).deletion == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("container", "serving"),
    [
        ({"started": True}, True),
        ({"started": False}, False),
        ({}, True),  # not reported by the kubelet: a running engine may hold requests
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}}, False),
        ({"name": "sidecar", "started": True}, False),
    ],
)
def test_only_a_started_engine_can_hold_requests(container: Object, serving: bool) -> None:
    assert member(running(**container)).serving is serving


def test_only_the_controller_reference_makes_a_member() -> None:
    owned = {"metadata": {"ownerReferences": [{"uid": "u", "controller": True}]}}
    assert controlled_by(owned, "u")
    assert not controlled_by(owned, "another")
    assert not controlled_by({"metadata": {"ownerReferences": [{"uid": "u"}]}}, "u")
    assert not controlled_by({"metadata": {}}, "u")


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


async def test_if_a_read_fails_the_others_end_before_its_error_is_raised() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the other read")

    async def fail() -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await read_together(wait(), fail())
    assert ended == ["the other read"]
