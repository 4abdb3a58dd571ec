"""GET and DELETE of `/v1/responses/{id}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton_gateway.access.admission import Admission
from baton_gateway.access.api_keys import CLIENT
from baton_gateway.http.body_budget import BodyBudget
from baton_gateway.http.slow_clients import send_json
from baton_gateway.requests.response_store import ResponseStore
from baton_text.responses.responses_api import DeletedResponse


class StoredResponses:
    """The endpoints of stored responses. A client sees only its own ones.

    The limits of `admission` count a request as one sequence. A response counts in `bodies` until
    it is sent.

    Args:
        client_timeout_s: longest time for a client to read the response.
    """

    def __init__(
        self,
        store: ResponseStore,
        admission: Admission,
        bodies: BodyBudget,
        *,
        client_timeout_s: float,
    ) -> None:
        self._store = store
        self._admission = admission
        self._bodies = bodies
        self._client_timeout_s = client_timeout_s

    async def get(self, http: web.Request) -> web.StreamResponse:
        with self._admission.place(http.get(CLIENT)):
            response = self._store.get(http.match_info["response"], http.get(CLIENT))
            async with self._bodies.charge() as charge:
                charge.add(len(response))
                return await send_json(http, response, self._client_timeout_s)

    async def delete(self, http: web.Request) -> web.StreamResponse:
        self._admission.check_open()
        response_id = http.match_info["response"]
        self._store.delete(response_id, http.get(CLIENT))
        deleted = msgspec.json.encode(DeletedResponse(id=response_id))
        return await send_json(http, deleted, self._client_timeout_s)
