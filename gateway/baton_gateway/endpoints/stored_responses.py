"""GET and DELETE of `/v1/responses/{id}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton_gateway.access.api_keys import CLIENT
from baton_gateway.endpoints.request_services import RequestServices
from baton_gateway.errors import RESPONSES_PATH
from baton_gateway.http.slow_clients import send_json
from baton_gateway.requests.response_store import ResponseStore
from baton_text.responses.responses_api import DeletedResponse


class StoredResponses:
    """The endpoints of stored responses. A client can read and delete only its own responses.

    A GET counts as one sequence in the limits of `admission`. Its response counts in the byte
    budget `services.bodies` until the response is sent.
    """

    def __init__(self, services: RequestServices, store: ResponseStore) -> None:
        self._services = services
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        path = f"{RESPONSES_PATH}/{{response}}"
        return [web.get(path, self.get), web.delete(path, self.delete)]

    async def get(self, http: web.Request) -> web.StreamResponse:
        with self._services.admission.reserve(http.get(CLIENT)):
            response = self._store.get(http.match_info["response"], http.get(CLIENT))
            async with self._services.bodies.charge(http.get(CLIENT)) as charge:
                charge.add(len(response))
                return await send_json(http, response, self._services.config.client_timeout_s)

    async def delete(self, http: web.Request) -> web.StreamResponse:
        self._services.admission.check_open()
        response_id = http.match_info["response"]
        self._store.delete(response_id, http.get(CLIENT))
        deleted = msgspec.json.encode(DeletedResponse(id=response_id))
        return await send_json(http, deleted, self._services.config.client_timeout_s)
