"""Probes of engines that are paused or asleep."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_kube.client import Object
from baton_operator.names import Key
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.observation import Observation, member
from baton_operator.status import status_probes
from baton_operator.status.status_probes import StatusProbes
from baton_protocol.process.health import Health
from support.http_server import serving
from support.operator.services import NOW, pod

REPLIES = {
    "127.0.0.1": Health("Asleep", "the engine sleeps at level 1"),
    "127.0.0.2": Health("Paused", "the engine is paused"),
    "127.0.0.3": Health("Loading", "loading /m"),
}
CREATED = NOW - timedelta(hours=2)
STARTS = {"name": "engine", "started": False, "state": {"running": {}}}


class Engines:
    """Responds to GET /ready at any address of 127.0.0.0/8 as an engine that is not ready."""

    def __init__(self) -> None:
        self.replies = dict(REPLIES)
        self.asked: list[str] = []
        self.most_at_once = 0
        self._now = 0

    async def ready(self, request: web.Request) -> web.Response:
        host = request.host.partition(":")[0]
        self.asked.append(host)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0.02)  # the time of a reply, in which other requests may arrive
        self._now -= 1
        return web.Response(status=503, body=msgspec.json.encode(self.replies[host]))

    def serve(self) -> Any:
        return serving(web.get("/ready", self.ready), host="0.0.0.0")


def at(host: str, ordinal: int, **options: Any) -> Object:
    status = options.pop("status", {})
    made = pod(f"demo-decode-{ordinal}", status={"podIP": host, **status}, **options)
    made["metadata"]["creationTimestamp"] = CREATED.isoformat()
    return made


def observation(*pods: Object) -> Observation:
    return Observation(
        key=Key("default", "demo"),
        freshness=Freshness(),
        service={},
        pods=list(pods),
        strays=[],
        objects={},
        kinds=set(),
        key_secret=None,
        service_key=None,
        members={"decode": list(map(member, pods)), "prefill": []},
    )


async def test_paused_and_sleeping_members_are_stored_for_the_planner_and_the_status() -> None:
    observed = observation(
        at("127.0.0.1", 0),
        at("127.0.0.2", 1),
        at("127.0.0.3", 2),
        at("127.0.0.1", 3, ready=True),
        at("127.0.0.1", 4, draining=True),
        at("127.0.0.1", 5, status={"containerStatuses": [STARTS]}),
    )
    engines = Engines()
    async with engines.serve() as port, aiohttp.ClientSession() as session:
        observed = await StatusProbes(session, port).find_suspended(observed, NOW)
    assert sorted(engines.asked) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert observed.suspended == {
        "demo-decode-0": REPLIES["127.0.0.1"],
        "demo-decode-1": REPLIES["127.0.0.2"],
    }
    since = [each.unready_since for each in observed.members["decode"]]
    assert since == [NOW, NOW, CREATED, None, CREATED, CREATED]
    assert observed.suspended_at == {"demo-decode-0": NOW, "demo-decode-1": NOW}


async def test_a_member_that_woke_up_is_unready_since_the_last_reply_of_its_sleep() -> None:
    engines = Engines()
    async with engines.serve() as port, aiohttp.ClientSession() as session:
        probes = StatusProbes(session, port)
        since = []
        for minutes, reply, is_ready in (
            (0, "Asleep", False),
            (1, "Asleep", False),
            (2, "Loading", False),
            (3, "Loading", False),
            (4, "Ready", True),
            (5, "Loading", False),
        ):
            engines.replies["127.0.0.1"] = Health(reply, "m")
            observed = observation(at("127.0.0.1", 0, ready=is_ready))
            observed = await probes.find_suspended(observed, NOW + timedelta(minutes=minutes))
            since.append(observed.members["decode"][0].unready_since)
    last = NOW + timedelta(minutes=1)
    assert since == [NOW, last, last, last, None, CREATED]


async def test_a_new_operator_reads_the_time_since_the_wake_up_from_the_member() -> None:
    engines = Engines()
    observed = observation(at("127.0.0.1", 0))
    async with engines.serve() as port, aiohttp.ClientSession() as session:
        for resumed_s, since in (
            (None, CREATED),
            (60.0, NOW - timedelta(minutes=1)),
            (1e9, CREATED),
            (1e300, CREATED),
            (-60.0, CREATED),
        ):
            engines.replies["127.0.0.1"] = Health("Ready", "m", resumed_s=resumed_s)
            found = await StatusProbes(session, port).find_suspended(observed, NOW)
            assert found.members["decode"][0].unready_since == since, resumed_s
            assert found.suspended == {}


async def test_all_members_are_probed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_probes, "CONCURRENCY", 2)
    pods = [at("127.0.0.1", ordinal) for ordinal in range(status_probes.MAX_PROBED + 1)]
    engines = Engines()
    async with engines.serve() as port, aiohttp.ClientSession() as session:
        found = await StatusProbes(session, port).readiness(pods)
    assert sorted(found) == sorted(each["metadata"]["name"] for each in pods)
    assert engines.most_at_once == 2


async def test_pods_without_a_reply_do_not_delay_the_reconcile_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_probes, "CONCURRENCY", 1)
    monkeypatch.setattr(status_probes, "TIMEOUT_S", 15.0)
    monkeypatch.setattr(status_probes, "DEADLINE_S", 3.0)
    pods = [at("127.0.0.1", 0), at("127.0.0.2", 1), at("127.0.0.1", 2)]
    ended = asyncio.Event()

    async def ready(request: web.Request) -> web.Response:
        if request.host.startswith("127.0.0.2"):
            await ended.wait()
        return web.Response(status=503, body=msgspec.json.encode(REPLIES["127.0.0.1"]))

    async with (
        serving(web.get("/ready", ready), host="0.0.0.0") as port,
        aiohttp.ClientSession() as session,
    ):
        found = await StatusProbes(session, port).readiness(pods)
        ended.set()
    assert set(found) == {"demo-decode-0"}
