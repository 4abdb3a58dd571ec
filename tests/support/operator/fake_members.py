"""Fake engines that drain, and a fake coordinator."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import web

from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import (
    COORDINATOR_HTTP_PORT,
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from support.http_server import serving
from support.waiting import until


class DrainingEngine:
    """An HTTP server with POST /drain, as an engine has it. The server may require a key."""

    def __init__(self, unfinished: int, key: ServiceKey | None = None) -> None:
        self.unfinished, self.asked, self.refused = unfinished, 0, 0
        self._key, self._ip = key, ""

    async def answer(self, request: web.Request) -> web.Response:
        signed = AdminRequest("POST", request.path_qs, self._ip)
        authorization = request.headers.get("Authorization")
        if self._key is not None and not self._key.admits(authorization, signed):
            self.refused += 1
            raise web.HTTPUnauthorized
        self.asked += 1
        return web.json_response({"draining": True, "unfinished": self.unfinished})

    def serve(self, ip: str) -> AbstractAsyncContextManager[int]:
        self._ip = ip
        return serving(web.post("/drain", self.answer), host=ip, port=8000)


class FakeCoordinator:
    """An HTTP server with the coordinator's API. Tests advance the operations."""

    def __init__(self) -> None:
        self.topology = TopologyStatus(generation=0, desired=[], members=[])
        self.requests: list[TopologyRequest] = []

    async def get(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.topology))

    async def put(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=TopologyRequest)
        self.requests.append(asked)
        self.topology.desired = sorted(asked.members)
        self._operate(OperationPhase.PREPARING)
        return await self.get(request)

    def commit(self) -> None:
        """Make all requested members serving ranks, and all other ranks STANDBY."""
        left = [each for each in self.topology.members if each.name not in self.topology.desired]
        for each in left:
            each.rank, each.phase = None, RankPhase.STANDBY
        ranks = [
            MemberStatus(name=name, instance_id=f"i-{name}", phase=RankPhase.SERVING, rank=rank)
            for rank, name in enumerate(self.topology.desired)
        ]
        self.topology.members = ranks + left
        self.topology.generation += 1
        self._operate(OperationPhase.DONE)

    def fail(self, reason: str) -> None:
        self._operate(OperationPhase.FAILED, reason)

    def _operate(self, phase: OperationPhase, reason: str = "") -> None:
        self.topology.operation = OperationStatus(
            operation_id=self.requests[-1].operation_id,
            kind="scale" if self.topology.generation else "form",
            phase=phase,
            generation=self.topology.generation + (phase is not OperationPhase.DONE),
            reason=reason,
            seconds={"waiting": 0.25},
        )

    async def requested(self, *names: str) -> None:
        async def asked() -> bool:
            return bool(self.requests) and self.requests[-1].members == sorted(names)

        await until(asked, f"the topology {names}; asked for: {self.requests}")

    def serve(self, ip: str) -> AbstractAsyncContextManager[int]:
        routes = web.get("/topology", self.get), web.put("/topology", self.put)
        return serving(*routes, host=ip, port=COORDINATOR_HTTP_PORT)
